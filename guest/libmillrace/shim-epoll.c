/* Epoll sets: the events that programs want from them, and those that they get while pipes run. */
#define _GNU_SOURCE
#include "protocol.h"
#include "shim.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Tags: data of the shim's own events. No pointer (a tag is not canonical) and no descriptor looks
 * like a tag. Below the mark: the socket's descriptor, the generation of the socket or pipe, and a
 * bit for a pipe. */
#define TAG_MARK (UINT64_C(0xfffe) << 48)
#define TAG_MARK_MASK (UINT64_C(0xffff) << 48)
#define TAG_FD_SHIFT 28
#define TAG_FD_MASK UINT64_C(0xfffff)
#define TAG_NUMBER_MASK UINT32_C(0x7ffffff)
#define TAG_OF_PIPE UINT64_C(1)

/* Until the first pipe, events are passed on unread. */
static _Atomic int are_tags_used;

static uint64_t make_tag(int fd, uint32_t number, uint64_t of_pipe)
{
	return TAG_MARK | (uint64_t)fd << TAG_FD_SHIFT |
	       (uint64_t)(number & TAG_NUMBER_MASK) << 1 | of_pipe;
}

static uint64_t make_pipe_tag(int fd, const struct entry *entry)
{
	return make_tag(fd, entry->pipe_generation, TAG_OF_PIPE);
}

static uint64_t make_socket_tag(int fd, const struct entry *entry)
{
	return make_tag(fd, entry->generation, 0);
}

/* Calls epoll_ctl(2) itself: neither a cancellation point nor one of the shim's wrappers. */
static int call_epoll_ctl(int set, int op, int fd, uint32_t events, uint64_t data)
{
	struct epoll_event event = {.events = events, .data.u64 = data};

	return (int)syscall(SYS_epoll_ctl, set, op, fd, &event);
}

/* Makes the kernel's event from the program's: without EPOLLOUT while a pipe runs. A one-shot event
 * must be observed: only then is it known whether to arm it again at the end. */
static struct epoll_event make_kernel_event(int fd, const struct entry *entry, uint32_t events,
					    uint64_t data)
{
	struct epoll_event event = {.events = events, .data.u64 = data};

	if (!entry->pipe || entry->pipe->fd < 0)
		return event;
	event.events &= ~(uint32_t)EPOLLOUT;
	if (events & EPOLLONESHOT)
		event.data.u64 = make_socket_tag(fd, entry);
	return event;
}

int shim_mask_output(int fd, const struct entry *entry)
{
	/* Whether it is armed now is not known. The program arms it after EAGAIN. */
	if (entry->events & EPOLLONESHOT)
		return 0;
	return call_epoll_ctl(entry->set, EPOLL_CTL_MOD, fd, entry->events & ~(uint32_t)EPOLLOUT,
			      entry->data);
}

void shim_unmask_output(int fd, const struct entry *entry)
{
	if (!(atomic_load(&entry->bits) & IN_SET))
		return;
	if (entry->events & EPOLLONESHOT && !entry->pipe->is_armed)
		return;
	/* The kernel checks the socket again, so no event is missed. Fails for a socket that was
	 * closed without a call that the shim sees. */
	(void)call_epoll_ctl(entry->set, EPOLL_CTL_MOD, fd, entry->events, entry->data);
}

void shim_leave_set(int fd, const struct entry *entry)
{
	if (atomic_load(&entry->bits) & IN_SET)
		(void)call_epoll_ctl(entry->set, EPOLL_CTL_DEL, fd, 0, 0);
}

int shim_watch_pipe(int fd, struct entry *entry)
{
	struct shim_pipe *pipe = entry->pipe;

	atomic_store(&are_tags_used, 1);
	if (call_epoll_ctl(entry->set, EPOLL_CTL_ADD, pipe->fd, EPOLLIN, make_pipe_tag(fd, entry)) <
	    0)
		return -1;
	pipe->set = entry->set;
	return 0;
}

/* Fate of a pipe's descriptor: the agent has answered and waits for another request; it is
 * useless; its number belongs to another file. */
enum fate { FATE_REUSED, FATE_CLOSED, FATE_FOREIGN };

static void close_pipe(struct shim_pipe *pipe, enum fate fate)
{
	struct entry *own = shim_find(pipe->fd);

	/* Explicitly: a child may have it open. */
	if (pipe->set >= 0 && fate != FATE_FOREIGN)
		(void)call_epoll_ctl(pipe->set, EPOLL_CTL_DEL, pipe->fd, 0, 0);
	if (own)
		atomic_store(&own->bits, 0);
	if (fate == FATE_REUSED)
		millrace_pool_connection(pipe->fd);
	else if (fate == FATE_CLOSED)
		syscall(SYS_close, pipe->fd);
	pipe->fd = -1;
	pipe->set = -1;
}

static void set_options(int fd, const struct shim_pipe *pipe)
{
	/* They fail when the connection has ended. */
	if (pipe->nodelay >= 0)
		(void)syscall(SYS_setsockopt, fd, IPPROTO_TCP, TCP_NODELAY, &pipe->nodelay,
			      sizeof(pipe->nodelay));
	if (pipe->cork >= 0)
		(void)syscall(SYS_setsockopt, fd, IPPROTO_TCP, TCP_CORK, &pipe->cork,
			      sizeof(pipe->cork));
}

void shim_drop_pipe(struct entry *entry)
{
	struct shim_pipe *pipe = entry->pipe;

	if (pipe->fd >= 0)
		close_pipe(pipe, FATE_CLOSED);
	shim_recycle_pipe(pipe);
	entry->pipe = NULL;
	atomic_fetch_and(&entry->bits, ~HAS_PIPE);
}

int shim_is_pipe_running(int fd, struct entry *entry)
{
	struct shim_pipe *pipe = entry->pipe;
	struct millrace_result result;
	enum fate fate;

	if (!pipe || pipe->fd < 0)
		return 0;
	switch (millrace_pipe_status(pipe->fd, &result)) {
	case 0:
		return 1;
	case -1:
		result = (struct millrace_result){.reason = MILLRACE_LOST};
		fate = FATE_FOREIGN;
		break;
	default:
		fate = result.reason == MILLRACE_LOST ? FATE_CLOSED : FATE_REUSED;
	}
	close_pipe(pipe, fate);
	set_options(fd, pipe);
	shim_unmask_output(fd, entry);
	if (pipe->gathered_bytes) {
		shim_end_gathered(fd, entry, &result);
		return 0;
	}
	pipe->moved_bytes = result.moved;
	pipe->is_lost = result.moved == 0 && result.reason == MILLRACE_LOST;
	if (result.moved == 0 && !pipe->is_lost) {
		shim_note_refusal(entry, &pipe->ends, result.reason);
		entry->use_original_once = 1;
		atomic_fetch_or(&entry->bits, REFUSED);
		shim_drop_pipe(entry);
	}
	return 0;
}

/* Notes that the socket is in this set now. Drops earlier state of its number, except a pipe of
 * the very same socket. */
COLD static void note_added(int set, int fd, struct entry *entry, const struct epoll_event *event)
{
	struct entry *set_entry = shim_find_or_make(set);
	uint32_t bits = IN_SET;

	/* It is in another set already. */
	if (atomic_load(&entry->bits) & IN_SET && entry->set != set &&
	    call_epoll_ctl(entry->set, EPOLL_CTL_MOD, fd, entry->events, entry->data) == 0)
		bits |= IN_MANY_SETS;
	if (event->events & EPOLLEXCLUSIVE)
		bits |= IN_MANY_SETS;
	entry->set = set;
	entry->events = event->events;
	entry->data = event->data.u64;
	if (entry->pipe) {
		entry->pipe->is_armed = 1;
		if (entry->pipe->fd >= 0 && entry->pipe->set != set) {
			if (entry->pipe->set >= 0)
				(void)call_epoll_ctl(entry->pipe->set, EPOLL_CTL_DEL,
						     entry->pipe->fd, 0, 0);
			entry->pipe->set = -1;
			(void)shim_watch_pipe(fd, entry);
		}
	}
	atomic_fetch_and(&entry->bits, ~IN_MANY_SETS);
	atomic_fetch_or(&entry->bits, bits);
	if (set_entry)
		atomic_fetch_or(&set_entry->bits, IS_SET);
}

/* Whether a number was freed without close(2), by fclose(3) for one, and belongs to another
 * socket. */
COLD static int is_stale(int fd, const struct entry *entry)
{
	struct stat stat;

	return entry->pipe && (fstat(fd, &stat) < 0 || stat.st_ino != entry->pipe->ends.out_ino);
}

COLD static int leave_set(int set, int fd, struct epoll_event *event, struct entry *entry)
{
	int result;

	/* The set reports the end of its pipe while it is known. */
	if (entry->set == set)
		shim_send_gathered(fd, entry);
	result = (int)syscall(SYS_epoll_ctl, set, EPOLL_CTL_DEL, fd, event);
	if (result == 0 && entry->set == set)
		atomic_fetch_and(&entry->bits, ~(IN_SET | IN_MANY_SETS));
	return result;
}

COLD static int control_known_socket(int set, int op, int fd, struct epoll_event *event,
				     struct entry *entry)
{
	struct epoll_event kernel_event;
	int result;

	if (op == EPOLL_CTL_DEL)
		return leave_set(set, fd, event, entry);
	if (op == EPOLL_CTL_ADD && is_stale(fd, entry))
		shim_forget(fd, fd);
	if (op == EPOLL_CTL_MOD && (!shim_get_bits(entry, IN_SET) || entry->set != set))
		return (int)syscall(SYS_epoll_ctl, set, op, fd, event);
	/* Later it is not known whether it has fired already. */
	if (event->events & EPOLLONESHOT)
		shim_send_gathered(fd, entry);
	kernel_event = make_kernel_event(fd, entry, event->events, event->data.u64);
	result = (int)syscall(SYS_epoll_ctl, set, op, fd, &kernel_event);
	if (result == 0 && op == EPOLL_CTL_ADD) {
		note_added(set, fd, entry, event);
	} else if (result == 0) {
		entry->events = event->events;
		entry->data = event->data.u64;
		if (entry->pipe)
			entry->pipe->is_armed = 1;
	}
	return result;
}

/* Changes the events of a socket without a pipe, the most frequent call of an event loop. Returns 1
 * with the result, or 0. */
INLINE int change_events(int set, int fd, struct epoll_event *event, int *result)
{
	struct entry *entry = shim_look_up(fd);
	int is_plain;

	if (!shim_lock_briefly())
		return 0;
	is_plain = shim_get_bits(entry, IN_SET | HAS_PIPE | IS_PIPE) == IN_SET && entry->set == set;
	if (is_plain) {
		*result = (int)syscall(SYS_epoll_ctl, set, EPOLL_CTL_MOD, fd, event);
		if (*result == 0) {
			entry->events = event->events;
			entry->data = event->data.u64;
		}
	}
	shim_unlock_briefly();
	return is_plain;
}

EXPORT HOT int epoll_ctl(int set, int op, int fd, struct epoll_event *event)
{
	int is_ours = op == EPOLL_CTL_ADD || op == EPOLL_CTL_MOD ? event != NULL
								 : op == EPOLL_CTL_DEL;
	struct entry *entry;
	int result;

	if (op == EPOLL_CTL_MOD && event && change_events(set, fd, event, &result))
		return result;
	/* A child of vfork(2) changes its parent's set: no need to check which process this is. */
	if (!is_ours || (op != EPOLL_CTL_ADD && !shim_has_bits(fd, IN_SET)) || !shim_lock())
		return ORIGINAL(epoll_ctl)(set, op, fd, event);
	entry = op == EPOLL_CTL_ADD ? shim_find_or_make(fd) : shim_find(fd);
	if (entry && !shim_get_bits(entry, IS_PIPE))
		result = control_known_socket(set, op, fd, event, entry);
	else
		result = (int)syscall(SYS_epoll_ctl, set, op, fd, event);
	shim_unlock();
	return result;
}

/* Translates an event. Returns true when the program gets it, in its own form. is_foreign: it is
 * for another process that shares this set, and stays. */
static int translate(struct epoll_event *event, int *is_foreign)
{
	uint64_t data = event->data.u64;
	int fd = (int)(data >> TAG_FD_SHIFT & TAG_FD_MASK);
	struct entry *entry = shim_find(fd);
	int is_for_program = 0;

	if ((data & TAG_MARK_MASK) != TAG_MARK)
		return 1;
	*is_foreign = 1;
	if (!entry || !shim_lock())
		return 0;
	if (data == make_pipe_tag(fd, entry)) {
		/* A child of fork(2) has none: its parent's number is the same. */
		*is_foreign = !entry->pipe || entry->pipe->fd < 0;
		(void)shim_is_pipe_running(fd, entry);
	} else if (data == make_socket_tag(fd, entry) && atomic_load(&entry->bits) & IN_SET) {
		*is_foreign = 0;
		/* Without a pipe it was armed again meanwhile, and the kernel reports it once
		 * more. */
		if (entry->pipe && entry->pipe->fd >= 0) {
			entry->pipe->is_armed = 0;
			event->data.u64 = entry->data;
			is_for_program = 1;
		}
	}
	shim_unlock();
	return is_for_program;
}

/* Returns how many events are left for the program. are_foreign: all of the others are for other
 * processes. */
static int translate_all(struct epoll_event *events, int count, int *are_foreign)
{
	int error = errno;
	int len = 0;

	*are_foreign = 1;
	for (int i = 0; i < count; i++) {
		int is_foreign = 0;

		if (translate(&events[i], &is_foreign))
			events[len++] = events[i];
		*are_foreign &= is_foreign;
	}
	errno = error;
	return len;
}

/* Call of the program that waits for events. */
struct wait {
	int set;
	struct epoll_event *events;
	int max;
	const sigset_t *mask;
	int (*call)(const struct wait *wait, int64_t timeout_ns);
};

#define NS_PER_S INT64_C(1000000000)
#define NS_PER_MS INT64_C(1000000)
/* In nanoseconds too. */
#define NO_TIMEOUT INT64_C(-1)

static int64_t now_ns(void)
{
	struct timespec now = {0};

	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * NS_PER_S + now.tv_nsec;
}

/* Sends gathered bytes before the program sleeps. */
static int send_and_wait(const struct wait *wait, int64_t timeout_ns)
{
	if (shim_send_due_parts(0) > 0 && timeout_ns != 0) {
		int count = wait->call(wait, 0);

		if (count != 0)
			return count;
		(void)shim_send_due_parts(1);
	}
	return wait->call(wait, timeout_ns);
}

/* Pauses: events for another process stay until that takes them. */
static int pause_for_others(const struct wait *wait)
{
	return ppoll(NULL, 0, &(struct timespec){.tv_nsec = NS_PER_MS}, wait->mask);
}

/* Whether the shim has no work before or after the call. */
INLINE int is_passthrough(void)
{
	return (atomic_load(&are_tags_used) | shim_is_gathering()) == 0;
}

/* Waits again when no event is left for the program: the kernel has the socket's own event at
 * once. */
static int wait_translated(const struct wait *wait, int64_t timeout_ns)
{
	int64_t start_ns = timeout_ns > 0 ? now_ns() : 0;
	int64_t remaining_ns = timeout_ns;

	if (shim_last_set != wait->set)
		shim_note_wait(wait->set);
	for (;;) {
		int count = send_and_wait(wait, remaining_ns);
		int are_foreign;

		if (count <= 0 || !atomic_load(&are_tags_used))
			return count;
		count = translate_all(wait->events, count, &are_foreign);
		if (count > 0 || (are_foreign && remaining_ns == 0))
			return count;
		if (are_foreign && pause_for_others(wait) < 0)
			return -1;
		if (timeout_ns > 0)
			remaining_ns = timeout_ns - (now_ns() - start_ns);
		if (timeout_ns > 0 && remaining_ns < 0)
			remaining_ns = 0;
	}
}

/* Converts to milliseconds, rounded up so as not to wake early. */
static int to_ms(int64_t timeout_ns)
{
	return timeout_ns < 0 ? -1 : (int)((timeout_ns + NS_PER_MS - 1) / NS_PER_MS);
}

static int wait_once(const struct wait *wait, int64_t timeout_ns)
{
	return ORIGINAL(epoll_wait)(wait->set, wait->events, wait->max, to_ms(timeout_ns));
}

static int pwait_once(const struct wait *wait, int64_t timeout_ns)
{
	return ORIGINAL(epoll_pwait)(wait->set, wait->events, wait->max, to_ms(timeout_ns),
				     wait->mask);
}

static int pwait2_once(const struct wait *wait, int64_t timeout_ns)
{
	struct timespec time = {.tv_sec = timeout_ns / NS_PER_S, .tv_nsec = timeout_ns % NS_PER_S};

	return ORIGINAL(epoll_pwait2)(wait->set, wait->events, wait->max,
				      timeout_ns < 0 ? NULL : &time, wait->mask);
}

EXPORT HOT int epoll_wait(int set, struct epoll_event *events, int max, int timeout_ms)
{
	struct wait wait;
	int count, are_foreign;

	/* The most frequent call of an event loop. */
	if (is_passthrough()) {
		if (__builtin_expect(shim_last_set != set, 0))
			shim_note_wait(set);
		count = ORIGINAL(epoll_wait)(set, events, max, timeout_ms);
		if ((count <= 0) | is_passthrough())
			return count;
		/* The first pipe of another thread began meanwhile. */
		count = translate_all(events, count, &are_foreign);
		if (count > 0)
			return count;
	}
	wait = (struct wait){set, events, max, NULL, wait_once};
	return wait_translated(&wait, timeout_ms < 0 ? NO_TIMEOUT : timeout_ms * NS_PER_MS);
}

EXPORT int epoll_pwait(int set, struct epoll_event *events, int max, int timeout_ms,
		       const sigset_t *mask)
{
	struct wait wait = {set, events, max, mask, pwait_once};

	return wait_translated(&wait, timeout_ms < 0 ? NO_TIMEOUT : timeout_ms * NS_PER_MS);
}

EXPORT int epoll_pwait2(int set, struct epoll_event *events, int max, const struct timespec *time,
			const sigset_t *mask)
{
	struct wait wait = {set, events, max, mask, pwait2_once};

	if (!time)
		return wait_translated(&wait, NO_TIMEOUT);
	/* The kernel reports the error. */
	if (time->tv_sec < 0 || time->tv_nsec < 0 || time->tv_nsec >= NS_PER_S)
		return ORIGINAL(epoll_pwait2)(set, events, max, time, mask);
	if (time->tv_sec > INT64_MAX / NS_PER_S - 1)
		return wait_translated(&wait, NO_TIMEOUT);
	return wait_translated(&wait, time->tv_sec * NS_PER_S + time->tv_nsec);
}
