/* Preloaded into a synchronizer: the next fsync fails where the file named by FAULT_FSYNC exists. It holds the errno, and is gone
 * afterwards. What was to be written is dropped from the page cache by the test's own check, not here. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int fsync(int file) {
    static int (*real)(int);
    const char *order = getenv("FAULT_FSYNC");
    if (!real) real = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    if (order) {
        FILE *opened = fopen(order, "r");
        if (opened) {
            int number = EIO;
            if (fscanf(opened, "%d", &number) != 1) number = EIO;
            fclose(opened);
            if (unlink(order) == 0) {
                errno = number;
                return -1;
            }
        }
    }
    return real(file);
}
