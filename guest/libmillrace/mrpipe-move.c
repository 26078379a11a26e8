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
		ssize_t written = pwrite(ends->out, bytes, len, ends->out_at);

		if (written < 0)
			die("write");
		ends->out_at += written;
		bytes += written;
		len -= (size_t)written;
	}
}

/* Copies through memory, as programs did before sendfile(2). */
static int64_t read_write(struct ends *ends, size_t count)
{
	static char buffer[BUFFER_BYTES];
	size_t len = count < BUFFER_BYTES ? count : BUFFER_BYTES;
	ssize_t got = ends->in_is_file ? pread(ends->in, buffer, len, ends->in_at)
				       : recv(ends->in, buffer, len, 0);

	if (got < 0)
		die("read");
	ends->in_at += got;
	write_all(ends, buffer, (size_t)got);
	return got;
}

/* Splices from a socket through a kernel pipe. */
static int64_t splice_through(struct ends *ends, size_t count)
{
	static int through[2] = {-1, -1};
	size_t len = count < BUFFER_BYTES ? count : BUFFER_BYTES;
	ssize_t got;

	if (through[0] < 0 && pipe2(through, O_CLOEXEC) < 0)
		die("pipe");
	got = splice(ends->in, NULL, through[1], NULL, len, SPLICE_F_MOVE);
	for (ssize_t left = got; left > 0;) {
		ssize_t gone = splice(through[0], NULL, ends->out,
				      ends->out_is_file ? &ends->out_at : NULL, (size_t)left,
				      SPLICE_F_MOVE);

		if (gone <= 0)
			die("splice");
		left -= gone;
	}
	return got;
}

/* Copies from file to file. Some file systems lack copy_file_range(2), or have it only within
 * one. */
static int64_t copy(struct ends *ends, size_t count)
{
	int64_t moved = copy_file_range(ends->in, &ends->in_at, ends->out, &ends->out_at, count, 0);

	if (moved >= 0 || (errno != EXDEV && errno != EOPNOTSUPP && errno != ENOSYS))
		return moved;
	if (lseek(ends->out, ends->out_at, SEEK_SET) < 0)
		die("seek");
	moved = sendfile(ends->out, ends->in, &ends->in_at, count);
	if (moved > 0)
		ends->out_at += moved;
	return moved;
}

/* Moves bytes without a vPipe. */
static int64_t plain(struct ends *ends, size_t count, enum mode mode)
{
	int64_t moved;

	if (mode == MODE_READ_WRITE)
		return read_write(ends, count);
	if (!ends->in_is_file)
		moved = splice_through(ends, count);
	else if (ends->out_is_file)
		moved = copy(ends, count);
	else
		moved = sendfile(ends->out, ends->in, &ends->in_at, count);
	if (moved < 0)
		die("move");
	return moved;
}

static int64_t piped(struct ends *ends, size_t count, const struct job *job, struct totals *totals)
{
	struct millrace_options options = MILLRACE_OPTIONS;
	int64_t moved;

	options.timeout_ms = job->timeout_ms;
	if (ends->in_is_file)
		options.in_offset = ends->in_at;
	if (ends->out_is_file)
		options.out_offset = ends->out_at;
	moved = millrace_pipe_options(ends->out, ends->in, count, &options);
	totals->reason = millrace_reason();
	totals->error = moved < 0 ? errno : 0;
	if (moved > 0) {
		totals->piped += moved;
		ends->in_at += moved;
		ends->out_at += moved;
	}
	return moved;
}

int64_t move(struct ends *ends, int64_t bytes, const struct job *job, struct totals *totals)
{
	enum mode mode = job->mode;
	int64_t done = 0;

	while (done < bytes) {
		size_t count = (size_t)(bytes - done);
		int is_pipe = mode == MODE_BOTH || mode == MODE_PIPE;
		int64_t moved;

		if (is_pipe) {
			moved = piped(ends, count, job, totals);
		} else {
			moved = plain(ends, count, mode);
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
