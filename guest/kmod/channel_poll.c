// SPDX-License-Identifier: GPL-2.0
/*
 * Polling the rings instead of waiting for doorbells (parameter poll_us).
 *
 * After a message came, a thread of the lowest class watches the rings for a while. It runs only
 * while its CPU has nothing else to do, so what it takes is time in which the CPU would have
 * halted, and nobody's work waits for it. While it runs, peers see that no doorbell is wanted; the
 * moment it is taken off the CPU, doorbells are asked for again, so that a message does not wait
 * for the thread's turn.
 *
 * The time is adapted between 0 and poll_us: a message that comes soon after the end doubles it, a
 * time without a message halves it.
 */
#include <linux/kthread.h>
#include <linux/ktime.h>
#include <linux/module.h>
#include <linux/preempt.h>
#include <linux/sched.h>
#include <uapi/linux/sched/types.h>

#include "channel.h"

#define MAX_POLL_US 10000
#define LEAST_NS 5000 /* a shorter time is none */

/* As long as the kernel's own guest_halt_poll_ns. */
static unsigned int poll_us = 200;
module_param(poll_us, uint, 0644);
MODULE_PARM_DESC(poll_us, "most microseconds that an idle CPU polls after a message, up to 10000; 0: never (200)");

static u64 max_ns(void)
{
	return min_t(u32, READ_ONCE(poll_us), MAX_POLL_US) * 1000ull;
}

static void arm(struct mr_vector *v)
{
	WRITE_ONCE(v->on_cpu, false);
	/* An interrupt finds what came meanwhile; this may be within the scheduler. */
	if (mr_vector_rearm(v))
		mr_ring(v->ch, v->ch->id, 1 + v->index);
}

static void disarm(struct mr_vector *v)
{
	WRITE_ONCE(v->on_cpu, true);
	mr_vector_disarm(v);
}

static void sched_in(struct preempt_notifier *notifier, int cpu)
{
}

static void sched_out(struct preempt_notifier *notifier, struct task_struct *next)
{
	struct mr_vector *v = container_of(notifier, struct mr_vector, notifier);

	if (READ_ONCE(v->on_cpu))
		arm(v);
}

static struct preempt_ops notifier_ops = { .sched_in = sched_in, .sched_out = sched_out };

/* Until nothing came for the time that is right now. */
static void poll_rings(struct mr_vector *v)
{
	u64 now = ktime_get_ns(), start = now, until = now + v->window_ns;

	while (now < until && !kthread_should_stop()) {
		if (!READ_ONCE(v->on_cpu))
			disarm(v);
		if (mr_vector_has_entries(v)) {
			mr_vector_kick(v);
			v->poll_hits++;
			until = ktime_get_ns() + v->window_ns;
		}
		cpu_relax();
		cond_resched();
		now = ktime_get_ns();
	}
	v->window_ns = v->window_ns / 2 < LEAST_NS ? 0 : v->window_ns / 2;
	v->poll_misses++;
	v->polled_ns += now - start;
	WRITE_ONCE(v->slept_ns, now);
	if (READ_ONCE(v->on_cpu))
		arm(v);
}

static int poller(void *data)
{
	struct mr_vector *v = data;

	preempt_notifier_init(&v->notifier, &notifier_ops);
	preempt_notifier_register(&v->notifier);
	while (!kthread_should_stop()) {
		set_current_state(TASK_IDLE);
		if (!READ_ONCE(v->poll_wanted) && !kthread_should_stop())
			schedule();
		__set_current_state(TASK_RUNNING);
		if (xchg(&v->poll_wanted, false))
			poll_rings(v);
	}
	preempt_notifier_unregister(&v->notifier);
	return 0;
}

/* Messages came. True: the thread watches the rings, so no doorbell is to be asked for. */
bool mr_poll_continue(struct mr_vector *v)
{
	u64 most = max_ns(), now;

	if (READ_ONCE(v->on_cpu))
		return true;
	if (!most || !v->poller)
		return false;
	now = ktime_get_ns();
	/* Polling a little longer would have found it. */
	if (now - READ_ONCE(v->slept_ns) < most)
		v->window_ns = min(max_t(u64, v->window_ns * 2, most / 4), most);
	if (!v->window_ns) {
		WRITE_ONCE(v->slept_ns, now);
	} else if (!READ_ONCE(v->poll_wanted)) {
		WRITE_ONCE(v->poll_wanted, true);
		wake_up_process(v->poller);
	}
	return false;
}

/* Without the thread there is no polling. */
void mr_poll_start(struct mr_vector *v)
{
	struct sched_attr attr = { .sched_policy = SCHED_IDLE };
	struct task_struct *task;

	task = kthread_create(poller, v, "millrace-poll/%u", v->index);
	if (IS_ERR(task)) {
		pr_warn("no thread for polling (%ld)\n", PTR_ERR(task));
		return;
	}
	sched_setattr_nocheck(task, &attr);
	kthread_bind(task, cpumask_local_spread(v->index, NUMA_NO_NODE));
	preempt_notifier_inc();
	v->poller = task;
	wake_up_process(task);
}

void mr_poll_stop(struct mr_vector *v)
{
	if (!v->poller)
		return;
	kthread_stop(v->poller);
	preempt_notifier_dec();
	v->poller = NULL;
}
