/* Copies from file to file: sendfile(2) into a file, and copy_file_range(2).
 *
 * The original copies the bytes that a pipe did not move, for any reason: bytes that may have
 * arrived are written again, the same ones to the same place. So both places go to the agent as
 * offsets. */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#define XFS_MAGIC 0x58465342
/* XFS_IOC_FSGEOMETRY_V4 of xfs_fs.h, a header that the C library lacks: the bytes before the
 * flags, the flags, and the bytes behind. */
struct xfs_geometry {
	uint32_t prefix[23];
	uint32_t flags;
	uint32_t suffix[4];
};
#define XFS_GEOMETRY _IOR('X', 124, struct xfs_geometry)
#define XFS_SHARES_BLOCKS (UINT32_C(1) << 20)

struct shim_ends shim_get_ends(const struct stat *in, const struct stat *out)
{
	return (struct shim_ends){
	    .in_dev = in->st_dev,
	    .in_ino = in->st_ino,
	    .out_dev = out->st_dev,
	    .out_ino = out->st_ino,
	    .out_is_file = S_ISREG(out->st_mode),
	};
}

int64_t shim_get_position(int fd, const off64_t *offset)
{
	return offset ? *offset : lseek64(fd, 0, SEEK_CUR);
}

void shim_move_position(int fd, off64_t *offset, int64_t to)
{
	if (offset)
		*offset = to;
	else
		(void)lseek64(fd, to, SEEK_SET);
}

/* Whether a file system can let files share blocks: there copy_file_range(2) moves no bytes at
 * all. ext4 cannot, and other file systems are not piped anyway. */
static int may_share_blocks(int fd, const struct shim_ends *ends)
{
	struct xfs_geometry geometry = {0};
	struct statfs statfs;

	if (ends->in_dev != ends->out_dev || fstatfs(fd, &statfs) < 0 ||
	    statfs.f_type != XFS_MAGIC)
		return 0;
	/* A file system that does not say may well do it. */
	return ioctl(fd, XFS_GEOMETRY, &geometry) < 0 || geometry.flags & XFS_SHARES_BLOCKS;
}

/* Whether a pipe may write to a file. Not if the descriptor writes elsewhere than at the offset, or
 * promises that bytes are on the disk: these calls are the kernel's. */
static int may_pipe_to(int out_fd)
{
	int flags = fcntl(out_fd, F_GETFL);

	return flags >= 0 && !(flags & (O_APPEND | O_DSYNC | O_SYNC));
}

static int may_request(const struct shim_ends *ends)
{
	int is_allowed;

	if (!shim_lock())
		return 0;
	is_allowed = shim_may_request(NULL, ends);
	shim_unlock();
	return is_allowed;
}

static void note_refusal(const struct shim_ends *ends, int reason)
{
	if (!shim_lock())
		return;
	shim_note_refusal(NULL, ends, reason);
	shim_unlock();
}

int shim_copy(const struct shim_copy *copy, ssize_t *result)
{
	struct shim_ends ends = shim_get_ends(&copy->in, &copy->out);
	struct millrace_options options = MILLRACE_OPTIONS;
	int64_t moved;

	options.in_offset = shim_get_position(copy->in_fd, copy->in_offset);
	options.out_offset = shim_get_position(copy->out_fd, copy->out_offset);
	/* Within one file, ranges may overlap, which is an error for some calls and none for
	 * others. */
	if ((ends.in_dev == ends.out_dev && ends.in_ino == ends.out_ino) || options.in_offset < 0 ||
	    options.out_offset < 0 || !may_pipe_to(copy->out_fd) || !may_request(&ends))
		return 0;
	moved = millrace_pipe_options(copy->out_fd, copy->in_fd, copy->count, &options);
	if (moved <= 0) {
		note_refusal(&ends, millrace_reason());
		return 0;
	}
	shim_move_position(copy->in_fd, copy->in_offset, options.in_offset + moved);
	shim_move_position(copy->out_fd, copy->out_offset, options.out_offset + moved);
	*result = (ssize_t)moved;
	return 1;
}

/* Tries a pipe. Returns 1 with the result when it moved bytes. */
static int try_copy(struct shim_copy *copy, ssize_t *result)
{
	struct shim_ends ends;
	int64_t remaining;

	if (fstat(copy->in_fd, &copy->in) < 0 || !S_ISREG(copy->in.st_mode))
		return 0;
	remaining = copy->in.st_size - shim_get_position(copy->in_fd, copy->in_offset);
	if (remaining <= 0 ||
	    !shim_pays((uint64_t)remaining < copy->count ? (uint64_t)remaining : copy->count) ||
	    fstat(copy->out_fd, &copy->out) < 0 || !S_ISREG(copy->out.st_mode))
		return 0;
	ends = shim_get_ends(&copy->in, &copy->out);
	return !may_share_blocks(copy->in_fd, &ends) && shim_copy(copy, result);
}

EXPORT ssize_t copy_file_range(int in_fd, off64_t *in_offset, int out_fd, off64_t *out_offset,
			       size_t count, unsigned flags)
{
	struct shim_copy copy = {in_fd, out_fd, in_offset, out_offset, count, {0}, {0}};
	int error = errno;
	ssize_t result;

	if (count > SHIM_MAX_COUNT)
		copy.count = SHIM_MAX_COUNT;
	if (flags == 0 && count >= atomic_load(&shim_gate_bytes) && try_copy(&copy, &result)) {
		errno = error;
		return result;
	}
	errno = error;
	return ORIGINAL(copy_file_range)(in_fd, in_offset, out_fd, out_offset, count, flags);
}
