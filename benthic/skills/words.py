"""The closed word lists that tasks draw from."""

COLOURS = ("red", "blue", "green", "yellow", "black", "white", "brown", "pink", "grey", "golden", "silver", "purple")
NAMES = (
    "Anna", "Ben", "Carl", "Ella", "Emma", "Finn", "Grace", "Hugo", "Ivy", "Jack", "Kira", "Lena",
    "Leo", "Lily", "Lucy", "Max", "Maya", "Mia", "Nina", "Noah", "Omar", "Paul", "Ravi", "Rosa",
    "Sam", "Sara", "Tim", "Tom", "Yuki", "Zoe", "Amir", "Eva", "Ian", "Jane", "Mark", "Ruth",
)  # fmt: skip
CITIES = (
    "Paris", "Rome", "Berlin", "Madrid", "London", "Oslo", "Vienna", "Prague", "Dublin", "Lisbon", "Athens", "Cairo",
    "Tokyo", "Delhi", "Lima", "Boston", "Chicago", "Toronto", "Sydney", "Moscow", "Geneva", "Milan", "Warsaw", "Kyoto",
)  # fmt: skip
FOODS = (
    "bread", "cheese", "soup", "rice", "fish", "cake", "honey", "apples", "pears", "tea", "milk", "pasta",
    "salad", "nuts", "eggs", "beans", "corn", "grapes",
)  # fmt: skip
ANIMALS = ("cat", "dog", "horse", "cow", "goat", "duck", "hen", "fox", "bear", "wolf", "mouse", "rabbit", "pig", "frog")
JOBS = (
    "teacher", "doctor", "baker", "farmer", "pilot", "nurse", "singer", "writer", "painter", "driver", "cook", "lawyer",
)  # fmt: skip
ROOMS = (
    "kitchen", "bedroom", "hall", "garden", "office", "garage", "attic", "library",
    "cellar", "bathroom", "lobby", "workshop", "nursery", "studio", "balcony", "pantry",
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
EVENTS = ("concert", "meeting", "party", "lesson", "market", "game", "dinner", "talk", "film", "race")
WEATHER = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy")
OBJECTS = (
    "box", "door", "key", "chest", "bag", "safe", "locker", "gate", "drawer", "case", "jar", "cup",
    "book", "boat", "house", "car", "tent", "lamp", "clock", "basket", "bottle", "suitcase", "cabinet", "tower",
)  # fmt: skip
COUNTED = ("apples", "books", "coins", "stamps", "shells", "cards", "pencils", "marbles", "stones", "tickets", "eggs")
