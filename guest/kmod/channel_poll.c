// SPDX-License-Identifier: GPL-2.0
/*
 * Polling the rings instead of waiting for doorbells (parameter poll_us).
 *
 * After a message came, a thread of the lowest class watches the rings for a while. It runs only
 * while its CPU has nothing else to do, so what it takes is time in which the CPU would have
 * halted, and nobody's work waits for it. While it watches, peers see that no doorbell is wanted;
 * before it gives the CPU to somebody, doorbells are asked for again, so that a message does not
 * wait for the thread's turn.
 *
 * The time window is at most WINDOW_DOORBELLS times what a doorbell costs here, which is measured
 * with each heartbeat. Within that limit it adapts like the kernel's halt polling: a message that
 * came after the window, but within the longest one, makes it longer; a later message, shorter.
 *
 * The same thread slows down senders that nothing else slows down (mr_rx_pause()): their messages
 * stay in the ring until the CPU has nothing else to do, so programs read what came before, and a
 * full ring makes the sender wait. A timer resumes receiving where the CPU is never idle.
 */
#include <linux/kthread.h>
#include <linux/ktime.h>
#include <linux/module.h>
#include <linux/preempt.h>
#include <linux/sched.h>
#include <uapi/linux/sched/types.h>

#include "channel.h"

#define MAX_POLL_US 10000
#define MIN_WINDOW_NS 5000 /* a shorter time counts as none */
#define SECTION_NS 2000000 /* without preemption; it ends at once when the CPU is wanted */
/*
 * A round trip without polling is two doorbells and the work of both sides. With a smaller factor,
 * two guests that answer each other would never begin to poll.
 */
#define WINDOW_DOORBELLS 8
#define PAUSE_NS 1000000 /* longest, where the CPU is never idle */
#define MAX_DOORBELL_NS 1000000 /* a longer one was delayed by the host */

static unsigned int poll_us = 1000;
module_param(poll_us, uint, 0644);
MODULE_PARM_DESC(poll_us,
		 "microseconds that an idle CPU polls after a message, to 10000; 0: never (1000)");

static u64 max_window_ns(const struct mr_channel *ch)
{
	u64 ns = min_t(u32, READ_ONCE(poll_us), MAX_POLL_US) * 1000ull;

	return min_t(u64, ns, WINDOW_DOORBELLS * READ_ONCE(ch->doorbell_ns));
}

/* Rings our own doorbell, to measure what it costs. */
void mr_poll_measure(struct mr_channel *ch)
{
	if (!READ_ONCE(poll_us) || READ_ONCE(ch->vector[0].is_watching))
		return;
	WRITE_ONCE(ch->measure_start_ns, ktime_get_ns());
	mr_ring(ch, ch->id, 1);
}

/* Ends a measurement with the first queue's doorbell. Hard interrupt. */
void mr_poll_handle_doorbell(struct mr_channel *ch)
{
	u64 start_ns = READ_ONCE(ch->measure_start_ns), old = ch->doorbell_ns, ns;

	if (!start_ns)
		return;
	WRITE_ONCE(ch->measure_start_ns, 0);
	ns = min_t(u64, ktime_get_ns() - start_ns, MAX_DOORBELL_NS);
	WRITE_ONCE(ch->doorbell_ns, old ? old - old / 8 + ns / 8 : ns);
}

static void arm(struct mr_vector *v)
{
	/* Either this thread sees that receiving pauses, or the softirq that no thread watches. */
	smp_store_mb(v->is_watching, false);
	if (!READ_ONCE(v->paused) && mr_vector_rearm(v))
		mr_vector_kick(v);
}

static void disarm(struct mr_vector *v)
{
	WRITE_ONCE(v->is_watching, true);
	mr_vector_disarm(v);
}

/* Watches until no message came for the current time limit, or the CPU is wanted. */
static void watch(struct mr_vector *v, u64 *until_ns)
{
	u64 now = ktime_get_ns(), end = now + SECTION_NS;

	while (now < min(*until_ns, end) && !need_resched() && !kthread_should_stop()) {
		if (mr_vector_has_entries(v)) {
			mr_vector_kick(v);
			v->poll_hits++;
			*until_ns = ktime_get_ns() + v->window_ns;
		}
		cpu_relax();
		now = ktime_get_ns();
	}
}

static void poll_rings(struct mr_vector *v)
{
	u64 start = ktime_get_ns(), until_ns = start + v->window_ns;

	while (ktime_get_ns() < until_ns && !kthread_should_stop()) {
		/* No other task runs here while no doorbell is requested. */
		preempt_disable();
		disarm(v);
		watch(v, &until_ns);
		arm(v);
		preempt_enable();
		cond_resched();
	}
	v->poll_misses++;
	v->polled_ns += ktime_get_ns() - start;
}

static int run_poller(void *data)
{
	struct mr_vector *v = data;

	while (!kthread_should_stop()) {
		set_current_state(TASK_IDLE);
		if (!READ_ONCE(v->poll_wanted) && !READ_ONCE(v->paused) && !kthread_should_stop())
			schedule();
		__set_current_state(TASK_RUNNING);
		cond_resched();
		if (READ_ONCE(v->paused))
			mr_vector_kick(v);
		if (xchg(&v->poll_wanted, false))
			poll_rings(v);
	}
	return 0;
}

static void adapt_window(struct mr_vector *v, u64 max_ns)
{
	u64 now = ktime_get_ns(), gap = now - v->last_message_ns, window = v->window_ns;

	v->last_message_ns = now;
	if (gap > max_ns)
		window = window / 2 < MIN_WINDOW_NS ? 0 : window / 2;
	else if (gap > window)
		window = max_t(u64, window * 2, max_ns / 4);
	v->window_ns = min(window, max_ns);
}

/* Goes on after messages came. True: the thread watches the rings, so no doorbell is needed. */
bool mr_poll_continue(struct mr_vector *v)
{
	if (!v->poller)
		return false;
	adapt_window(v, max_window_ns(v->ch));
	if (READ_ONCE(v->is_watching))
		return true;
	if (v->window_ns && !READ_ONCE(v->poll_wanted)) {
		WRITE_ONCE(v->poll_wanted, true);
		wake_up_process(v->poller);
	}
	return false;
}

/* Receives again after a pause, where the CPU was never idle. Softirq. */
static enum hrtimer_restart resume_receiving(struct hrtimer *timer)
{
	struct mr_vector *v = container_of(timer, struct mr_vector, resume_timer);

	/* Orders the timer's end before the check: see mr_poll_pause(). */
	smp_mb();
	if (READ_ONCE(v->paused))
		napi_schedule(&v->napi);
	return HRTIMER_NORESTART;
}

/*
 * Pauses receiving: no doorbell is requested until the thread goes on, or the timer fires. False:
 * there is no thread.
 */
bool mr_poll_pause(struct mr_vector *v)
{
	if (!v->poller)
		return false;
	adapt_window(v, max_window_ns(v->ch));
	/* Before the check of the timer, which may expire just now: see resume_receiving(). */
	smp_store_mb(v->paused, true);
	/* Setting the timer costs a hypervisor much more than one that fires early. */
	if (!hrtimer_is_queued(&v->resume_timer))
		hrtimer_start(&v->resume_timer, ns_to_ktime(PAUSE_NS),
			      HRTIMER_MODE_REL_PINNED_SOFT);
	wake_up_process(v->poller);
	return true;
}

/* Starts the thread of a vector. Where that fails there is neither polling nor pausing. */
void mr_poll_start(struct mr_vector *v)
{
	struct sched_attr attr = { .sched_policy = SCHED_IDLE };
	struct task_struct *task;

	hrtimer_init(&v->resume_timer, CLOCK_MONOTONIC, HRTIMER_MODE_REL_PINNED_SOFT);
	v->resume_timer.function = resume_receiving;
	task = kthread_create(run_poller, v, "millrace-poll/%u", v->index);
	if (IS_ERR(task)) {
		pr_warn("no thread for polling (%ld)\n", PTR_ERR(task));
		return;
	}
	sched_setattr_nocheck(task, &attr);
	kthread_bind(task, cpumask_local_spread(v->index, NUMA_NO_NODE));
	v->poller = task;
	wake_up_process(task);
}

/* Stops the thread of a vector. NAPI, which wakes the thread, is disabled. */
void mr_poll_stop(struct mr_vector *v)
{
	if (!v->poller)
		return;
	kthread_stop(v->poller);
	v->poller = NULL;
	hrtimer_cancel(&v->resume_timer);
}
