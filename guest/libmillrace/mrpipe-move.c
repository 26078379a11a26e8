/* Methods of mrpipe to move bytes: a pipe, calls that keep them in the kernel, or its own
 * memory. */
#define _GNU_SOURCE
#include "mrpipe.h"

#include "millrace.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <unistd.h>

/* Bytes that read(2) and write(2), or a kernel pipe, move in one call. */
#define BUFFER_BYTES (64 * 1024)

static void write_all(struct ends *ends, const char *bytes, size_t len)
{
	if (!ends->out_is_file) {
		send_all(ends->out, bytes, len);
		return;
	}
	while (len > 0) {
		ssize_t written = pwrite(ends->out, bytes, len, ends->out_offset);

		if (written < 0)
			die("write");
		ends->out_offset += written;
		bytes += written;
		len -= (size_t)written;
	}
}

/* Copies through memory, as programs did before sendfile(2). */
static int64_t read_write(struct ends *ends, size_t count)
{
	static char buffer[BUFFER_BYTES];
	size_t len = count < BUFFER_BYTES ? count : BUFFER_BYTES;
	ssize_t len_read = ends->in_is_file ? pread(ends->in, buffer, len, ends->in_offset)
				       : recv(ends->in, buffer, len, 0);

	if (len_read < 0)
		die("read");
	ends->in_offset += len_read;
	write_all(ends, buffer, (size_t)len_read);
	return len_read;
}

/* Splices from a socket through a kernel pipe. */
static int64_t splice_bytes(struct ends *ends, size_t count)
{
	static int kernel_pipe[2] = {-1, -1};
	size_t len = count < BUFFER_BYTES ? count : BUFFER_BYTES;
	ssize_t len_read;

	if (kernel_pipe[0] < 0 && pipe2(kernel_pipe, O_CLOEXEC) < 0)
		die("pipe");
	len_read = splice(ends->in, NULL, kernel_pipe[1], NULL, len, SPLICE_F_MOVE);
	for (ssize_t remaining = len_read; remaining > 0;) {
		ssize_t written = splice(kernel_pipe[0], NULL, ends->out,
					 ends->out_is_file ? &ends->out_offset : NULL,
					 (size_t)remaining, SPLICE_F_MOVE);

		if (written <= 0)
			die("splice");
		remaining -= written;
	}
	return len_read;
}

/* Copies from file to file. Some file systems lack copy_file_range(2), or have it only within
 * one. */
static int64_t copy_file(struct ends *ends, size_t count)
{
	int64_t moved = copy_file_range(ends->in, &ends->in_offset, ends->out, &ends->out_offset,
					count, 0);

	if (moved >= 0 || (errno != EXDEV && errno != EOPNOTSUPP && errno != ENOSYS))
		return moved;
	if (lseek(ends->out, ends->out_offset, SEEK_SET) < 0)
		die("seek");
	moved = sendfile(ends->out, ends->in, &ends->in_offset, count);
	if (moved > 0)
		ends->out_offset += moved;
	return moved;
}

/* Moves bytes without a vPipe. */
static int64_t move_plain(struct ends *ends, size_t count, enum mode mode)
{
	int64_t moved;

	if (mode == MODE_READ_WRITE)
		return read_write(ends, count);
	if (!ends->in_is_file)
		moved = splice_bytes(ends, count);
	else if (ends->out_is_file)
		moved = copy_file(ends, count);
	else
		moved = sendfile(ends->out, ends->in, &ends->in_offset, count);
	if (moved < 0)
		die("move");
	return moved;
}

static int64_t move_by_pipe(struct ends *ends, size_t count, const struct job *job,
			    struct totals *totals)
{
	struct millrace_options options = MILLRACE_OPTIONS;
	int64_t moved;

	options.timeout_ms = job->timeout_ms;
	if (ends->in_is_file)
		options.in_offset = ends->in_offset;
	if (ends->out_is_file)
		options.out_offset = ends->out_offset;
	moved = millrace_pipe_options(ends->out, ends->in, count, &options);
	totals->reason = millrace_reason();
	totals->error = moved < 0 ? errno : 0;
	if (moved > 0) {
		totals->piped += moved;
		ends->in_offset += moved;
		ends->out_offset += moved;
	}
	return moved;
}

int64_t move_bytes(struct ends *ends, int64_t bytes, const struct job *job, struct totals *totals)
{
	enum mode mode = job->mode;
	int64_t done = 0;

	while (done < bytes) {
		size_t count = (size_t)(bytes - done);
		int is_pipe = mode == MODE_BOTH || mode == MODE_PIPE;
		int64_t moved;

		if (is_pipe) {
			moved = move_by_pipe(ends, count, job, totals);
		} else {
			moved = move_plain(ends, count, mode);
			totals->sent += moved;
		}
		if (moved > 0)
			done += moved;
		else if (is_pipe && mode == MODE_BOTH && millrace_may_fall_back(totals->reason))
			mode = MODE_PLAIN;
		else
			return done;
	}
	return done;
}
