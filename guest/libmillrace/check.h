/* Conditions of the shim's check programs: a failed one ends the program and says where. */
#ifndef CHECK_H
#define CHECK_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(what)                                                                   \
	do {                                                                          \
		if (!(what)) {                                                        \
			fprintf(stderr, "line %d: %s (errno %d)\n", __LINE__, #what, errno);  \
			exit(1);                                                      \
		}                                                                     \
	} while (0)

#endif
