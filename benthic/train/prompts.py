"""Prompts for a corpus of model-made text: seven kinds, each a few forms filled with common words.

A prompt follows from its random generator alone. Shares of the kinds are those of the corpus that minnow is trained on.
"""

import random

from benthic.skills.words import NAMES

SHARES = {"story": 57, "qa": 12, "poem": 8, "dialog": 7, "explain": 6, "code": 5, "tips": 5}  # percent


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS = _words(
    """apple arm army art author baby bag ball bank basket beach bear bed bell bench bicycle bird birthday boat body
    book border bottle bowl box branch bread bridge brother brush bucket building bus butter button cake camera camp
    candle captain car card carpet castle cat cave chain chair chance change cheese child church circle city class clock
    cloud coat coffee coin color cook corner country cousin cow crowd cup daughter day desert desk dinner doctor dog
    door dream dress drum duck ear egg engine evening example eye face family farm father feather fence festival field
    finger fire fish flag flower food forest friend frog fruit game garden gate gift glass goat gold grandmother grass
    guest guitar hair hammer hand harbor hat heart hill history hole holiday home honey horse hospital hotel hour house
    idea island jacket job journey judge key king kitchen kite knife lake lamp language leader leaf lesson letter
    library light line lion list machine magic map market master meal meat medicine meeting memory milk mirror mistake
    money monkey moon morning mother mountain mouse music name nature neck needle neighbor net news night noise nose
    number nurse ocean office oil orange paint paper parent park party path pen people phone picture pig pilot place
    plan plant plate pocket poem police pool potato present price prince problem promise queen question rabbit race
    radio rain reason record ring river road rock roof room root rope rule sand school science sea season secret seed
    sheep shelf ship shirt shoe shop shoulder sister skill skin sky smile snow soap soldier song soup space spider spoon
    spring square stamp star station stick stone storm story stranger street string student sugar summer sun surprise
    table tail teacher team tent test thief ticket tiger time tool tooth tower town toy train travel treasure tree truck
    uncle valley village voice wall watch water wave weather week wheel wind window wing winter wolf woman wood word
    work world writer yard year"""
)
VERBS = _words(
    """add allow answer arrive ask bake bite blow borrow break bring build burn buy call carry catch change choose clean
    climb close collect come compare cook count cover cross cry cut dance decide deliver dig discover draw dream drink
    drive drop eat enjoy enter explain fall feed feel fight fill find finish fix fly fold follow forget forgive gather
    give go grow guess guide hang hear help hide hold hope hunt hurry improve invent invite jump keep kick knock know
    laugh lead learn leave lend lift like listen live lock look lose love make mark measure meet mix move need notice
    offer open order paint pass pay pick plan plant play polish pour prepare promise protect pull push put reach read
    receive remember remove repair rest return ride ring rise roll run save search see sell send share shout show sing
    sit sleep smell solve speak spend stand start stay steal stop study swim take taste teach tell thank think throw
    touch trade travel trust try turn understand use visit wait wake walk want warn wash watch wear whisper win wish
    work worry wrap write"""
)
ADJECTIVES = _words(
    """alive angry bad beautiful big bitter black blue bold brave bright broken brown busy calm careful cheap cheerful
    clean clear clever cold cool curious dangerous dark deep different dirty dry early easy empty excited fair famous
    fast fat fine foolish free fresh friendly full funny gentle glad golden good gray great green happy hard healthy
    heavy helpful high honest hot huge hungry important kind large late lazy light little lonely long loud lovely lucky
    mild modern narrow new nice noisy old open patient perfect plain pleasant polite poor pretty proud purple quick
    quiet rare ready real red rich right rough round sad safe secret serious shallow sharp short shy silent silly simple
    slow small smart smooth soft sour special still strange strong sudden sweet tall tame tasty terrible thick thin tiny
    tired true ugly useful usual warm weak wet white whole wide wild wise wonderful wooden wrong yellow young"""
)
CREATURES = ("bear", "bird", "cat", "dog", "duck", "elephant", "fox", "frog", "horse", "mouse", "pig", "rabbit", "wolf")
TURNS = (
    "The story has a happy ending.", "The story has a sad ending.", "The story has a small surprise.",
    "The story takes place at night.", "The story takes place at school.", "The story takes place by the sea.",
    "The story takes place in a forest.", "The story takes place in a big city.", "The story is about friendship.",
    "The story teaches a lesson.", "The story has a dialogue.", "It rains in the story.",
    "There is a problem and a clever solution.", "Somebody makes a mistake and fixes it.",
)  # fmt: skip
QUESTIONS = (
    "Where would you find {noun}?", "What can you do with {noun}?", "Who needs {noun}, and why?",
    "Tell me something interesting about {noun}.", "What happens when you {verb} {noun}?",
    "How can I {verb} {noun}?", "Is {noun} more {adjective} than {other}? Explain.",
    "What should I do if my {bare} is {adjective}?",
)  # fmt: skip
EXPLANATIONS = (
    "Explain in simple words what {noun} is.", "What does the word \"{bare}\" mean?",
    "What is the difference between {noun} and {other}?", "Use the word \"{bare}\" in three sentences.",
    "How would you describe {noun} to a child?", "Give an example of {noun} in daily life.",
    "Why is {noun} important?", "What is {noun}? Answer in a few sentences.",
)  # fmt: skip
TIPS = (
    "Give me three tips to {verb} {noun}.", "List five things that are {adjective}.",
    "Make a short plan to {verb} {noun}.", "Write a list of things you need for {noun}.",
    "Give two reasons to {verb} and two reasons not to.", "List four words that go with \"{bare}\".",
)  # fmt: skip
POEMS = (
    "Write a short poem about {adjective_noun}.", "Write a short description of {adjective_noun}.",
    "Write a short news report about {adjective_noun}.", "Write a letter from {name} to {friend} about {noun}.",
)  # fmt: skip
DIALOGS = (
    "Write a short conversation between {name} and {friend} about {adjective_noun}.",
    "{name} and {friend} talk about {noun}. Write what they say.",
)
FUNCTIONS = (
    "adds two numbers", "reverses a string", "sorts a list of names", "sums the even numbers in a list",
    "counts the vowels in a string", "counts the words in a string", "checks whether a number is prime",
    "checks whether a word is a palindrome", "converts Celsius to Fahrenheit", "returns the largest number in a list",
    "returns the average of a list", "removes duplicates from a list", "merges two dictionaries",
    "finds the shortest word in a list", "finds the index of an item in a list", "multiplies all numbers in a list",
    "returns the squares of a list of numbers", "returns the first n Fibonacci numbers",
    "turns a string into capital letters", "counts how often each letter occurs", "rounds a price to two digits",
)  # fmt: skip
TASKS = (
    "make a class", "make a random number", "measure time", "catch an exception", "format a string", "split a string",
    "join a list of strings", "loop over a dictionary", "use a list comprehension", "write text to a file",
    "read a file line by line", "sort a dictionary by value", "copy a list", "check the type of a value",
    "remove an item from a list",
)  # fmt: skip


def draw(rng: random.Random) -> tuple[str, str]:
    """(kind, prompt)."""
    kind = rng.choices(list(SHARES), list(SHARES.values()))[0]
    return kind, _MAKERS[kind](rng)


def _story(rng: random.Random) -> str:
    words = [rng.choice(NOUNS), rng.choice(VERBS), rng.choice(ADJECTIVES)]
    parts = ['Write a short story for a young child. Use the words "{}", "{}" and "{}".'.format(*words)]
    if rng.random() < 0.6:
        parts.append(rng.choice(TURNS))
    if rng.random() < 0.45:
        creature = f", {_with_article(rng.choice(CREATURES))}" if rng.random() < 0.4 else ""
        parts.append(f"The main character is {rng.choice(NAMES)}{creature}.")
    return " ".join(parts)


def _filled(rng: random.Random, forms: tuple[str, ...]) -> str:
    bare, other = rng.sample(NOUNS, 2)
    adjective = rng.choice(ADJECTIVES)
    name, friend = rng.sample(NAMES, 2)
    return rng.choice(forms).format(
        bare=bare,
        noun=_with_article(bare),
        other=_with_article(other),
        verb=rng.choice(VERBS),
        adjective=adjective,
        adjective_noun=_with_article(f"{adjective} {bare}"),
        name=name,
        friend=friend,
    )


def _code(rng: random.Random) -> str:
    if rng.random() < 0.6:
        return f"Write a short Python function that {rng.choice(FUNCTIONS)}."
    return f"How do I {rng.choice(TASKS)} in Python? Show a short example."


def _with_article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' and not words.startswith(('use', 'one')) else 'a'} {words}"


_MAKERS = {
    "story": _story,
    "qa": lambda rng: _filled(rng, QUESTIONS),
    "poem": lambda rng: _filled(rng, POEMS),
    "dialog": lambda rng: _filled(rng, DIALOGS),
    "explain": lambda rng: _filled(rng, EXPLANATIONS),
    "code": _code,
    "tips": lambda rng: _filled(rng, TIPS),
}
