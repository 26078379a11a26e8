/*
 * An allocator that aborts: preloaded into the real daemon, it hands everything on to the C
 * library, but ends the process when one guarded thread asks for memory or gives some back. Which
 * one stands in a file that the test writes, mapped before the daemon locks itself in: no system
 * call tells when.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);
void __libc_free(void *);

static pid_t nobody;
/* The guarded thread's number, 0 for none. */
static volatile pid_t *guarded = &nobody;
static __thread pid_t self __attribute__((tls_model("initial-exec")));

__attribute__((constructor)) static void map_the_file(void)
{
	const char *path = getenv("NOALLOC_FILE");
	int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
	void *map = fd < 0 ? MAP_FAILED
			   : mmap(NULL, sizeof(pid_t), PROT_READ, MAP_SHARED, fd, 0);

	/* A test that guards nothing must not pass. */
	if (map == MAP_FAILED)
		_exit(99);
	close(fd);
	guarded = map;
}

static inline void check(const char *what)
{
	pid_t tid = *guarded;

	if (!tid)
		return;
	if (!self)
		self = gettid();
	if (self != tid)
		return;
	/* What cannot be written is still told by the end of the process. */
	(void)!write(STDERR_FILENO, what, strlen(what));
	abort();
}

void *malloc(size_t len)
{
	check("noalloc: malloc in the loop\n");
	return __libc_malloc(len);
}

void *calloc(size_t count, size_t len)
{
	check("noalloc: calloc in the loop\n");
	return __libc_calloc(count, len);
}

void *realloc(void *old, size_t len)
{
	check("noalloc: realloc in the loop\n");
	return __libc_realloc(old, len);
}

void *memalign(size_t align, size_t len)
{
	check("noalloc: memalign in the loop\n");
	return __libc_memalign(align, len);
}

void *aligned_alloc(size_t align, size_t len)
{
	return memalign(align, len);
}

int posix_memalign(void **out, size_t align, size_t len)
{
	*out = memalign(align, len);
	return *out ? 0 : ENOMEM;
}

void free(void *old)
{
	if (old)
		check("noalloc: free in the loop\n");
	__libc_free(old);
}
