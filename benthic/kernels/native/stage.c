/* File bytes to a device, over pieces of pinned memory in turn: what one thread does of a job while weights are loaded.
 *
 * It is C because pieces must be small. One that the processor's caches hold is read out of them by the link, and never
 * goes to memory and back; but threads of Python that come back from a call wait for one lock, piece by piece. */
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

enum { DONE, NOT_READ, CUT_SHORT, NOT_COPIED };
enum { PIECES = 2 };

/* The device's driver; each returns 0, or why not. All NULL: `out` is memory of the host, or 0 where bytes are only
 * read. */
struct driver {
    int (*copy)(uint64_t out, const void *piece, size_t nbytes, void *stream);
    int (*record)(void *event, void *stream);
    int (*wait)(void *event);
};

/* One thread's own. */
struct lane {
    char *pieces[PIECES];
    void *events[PIECES]; /* of each piece's last copy */
    int64_t nbytes;       /* of a piece */
    int64_t turn;         /* the piece used last */
    void *stream;
};

/* Bytes that follow each other in a file and in the batch. */
struct run {
    int64_t file, offset; /* descriptor, first byte there */
    int64_t at, nbytes;   /* first byte in the batch */
};

/* What went wrong: an error number of the system or the driver, or the run and the byte of its file that is missing. */
struct failure {
    int64_t code, run, offset;
};

/* Bytes start .. end-1 of a batch, whose first byte is at `out`; what lies between runs gets any value.
 * runs [n], by their place in the batch */
int32_t benthic_stage(const struct run *runs, int64_t n, int64_t start, int64_t end, uint64_t out, struct lane *lane,
                      const struct driver *driver, struct failure *failure) {
    int64_t next = 0; /* the first run that does not end before the piece */
    for (int64_t first = start; first < end; first += lane->nbytes) {
        int64_t last = first + lane->nbytes < end ? first + lane->nbytes : end;
        lane->turn = (lane->turn + 1) % PIECES;
        char *piece = lane->pieces[lane->turn];
        void *event = lane->events[lane->turn];
        if (driver->wait && (failure->code = driver->wait(event))) return NOT_COPIED;
        while (next < n && runs[next].at + runs[next].nbytes <= first) next++;
        for (int64_t i = next; i < n && runs[i].at < last; i++) {
            int64_t at = runs[i].at > first ? runs[i].at : first;
            int64_t stop = runs[i].at + runs[i].nbytes < last ? runs[i].at + runs[i].nbytes : last;
            while (at < stop) {
                int64_t offset = runs[i].offset + at - runs[i].at;
                ssize_t got = pread((int)runs[i].file, piece + (at - first), (size_t)(stop - at), offset);
                if (got < 0 && errno == EINTR) continue;
                *failure = (struct failure){errno, i, offset};
                if (got < 0) return NOT_READ;
                if (!got) return CUT_SHORT;
                at += got;
            }
        }
        if (!driver->copy) {
            if (out) memcpy((char *)(uintptr_t)(out + (uint64_t)first), piece, (size_t)(last - first));
            continue;
        }
        failure->code = driver->copy(out + (uint64_t)first, piece, (size_t)(last - first), lane->stream);
        if (!failure->code) failure->code = driver->record(event, lane->stream);
        if (failure->code) return NOT_COPIED;
    }
    return DONE;
}
