// SPDX-License-Identifier: GPL-2.0
/*
 * Marks, by which a guest learns that everything it sent before them has arrived: frames of their
 * own on the ordinary way, messages on the channel. Why: net_move.c.
 */
#include <linux/cpu.h>
#include <linux/etherdevice.h>
#include <linux/netdevice.h>
#include <linux/percpu.h>
#include <linux/random.h>
#include <linux/rculist.h>
#include <linux/wait.h>
#include <linux/workqueue.h>
#include <net/sch_generic.h>

#include "net.h"

#define MAX_MARKS 32 /* of a member that wait for answers; others are lost, and sent again */
#define VISIT_MS 20 /* time limit for CPUs that are busy receiving; twice that is below MARK_MS */

/* Marks of one member, of one form, that wait for answers. */
struct marks {
	unsigned int len;
	struct mark {
		u32 token;
		u16 count; /* of queues by which it came */
	} mark[MAX_MARKS];
};

/* Two sets of marks: one to which marks are added, and one that is being answered. */
static struct marks marks[2][MR_MARK_PATHS][MR_MAX_MEMBERS];
static unsigned int open_set; /* index of the set to which marks are added */
static DEFINE_SPINLOCK(marks_lock);

/* Check of a CPU, by a task on it, for packets that it has not received yet. */
struct visit {
	struct work_struct work;
	u32 check_id; /* number of the last check of all CPUs */
	u32 idle_check_id; /* number of the last check that found nothing left to receive */
};

static DEFINE_PER_CPU(struct visit, visits);
static DECLARE_WAIT_QUEUE_HEAD(visit_queue);

/* Whether the queueing disciplines of a device are empty. */
bool mr_are_queues_empty(const struct net_device *dev)
{
	unsigned int i, len = 0;

	rcu_read_lock();
	for (i = 0; i < READ_ONCE(dev->real_num_tx_queues); i++)
		len += qdisc_qlen_sum(rcu_dereference(netdev_get_tx_queue(dev, i)->qdisc));
	rcu_read_unlock();
	return !len;
}

/* Sends a mark the ordinary way, behind all packets of this transmit queue. */
static void send_mark(struct mr_dest *dest, u16 queue)
{
	const struct mr_self *self = rcu_dereference_protected(mr_self,
							       lockdep_is_held(&mr_net_lock));
	struct mr_net_mark mark = {
		.magic = cpu_to_le32(MR_NET_MAGIC),
		.to_id = cpu_to_le32(dest->id),
		.token = cpu_to_le32(dest->token),
	};
	struct sk_buff *skb;

	/* The host may have removed us from its table since the move began. */
	skb = self ? alloc_skb(LL_MAX_HEADER + ETH_ZLEN, GFP_KERNEL) : NULL;
	if (!skb)
		return;
	mark.from_id = cpu_to_le32(self->id);
	skb_reserve(skb, LL_MAX_HEADER);
	skb->dev = dest->dev;
	skb->protocol = htons(MR_NET_ETHERTYPE);
	skb_put_data(skb, &mark, sizeof(mark));
	skb_put_zero(skb, ETH_ZLEN - ETH_HLEN - sizeof(mark));
	if (dev_hard_header(skb, dest->dev, MR_NET_ETHERTYPE, dest->eth, dest->eth + ETH_ALEN,
			    skb->len) < 0) {
		kfree_skb(skb);
		return;
	}
	skb_reset_mac_header(skb);
	skb_record_rx_queue(skb, queue);
#ifdef CONFIG_XPS
	/* From a CPU that is in no map, or the maps of CPUs to queues would choose another one. */
	skb->sender_cpu = nr_cpu_ids + 1;
#endif
	dev_queue_xmit(skb);
}

/* Gives the next marks another token. Readers are waited for before these marks are sent. */
void mr_renew_marks(struct mr_dest *dest)
{
	dest->queue = 0;
	dest->queues = 0;
	WRITE_ONCE(dest->token, get_random_u32());
}

/* Whether all marks were sent. */
bool mr_is_marked(const struct mr_dest *dest)
{
	return dest->queues && dest->queue == dest->queues;
}

bool mr_are_marks_answered(const struct mr_dest *dest)
{
	return mr_is_marked(dest) && atomic_read(&dest->marks) <= 0;
}

static void begin_marks(struct mr_dest *dest, unsigned int queues)
{
	dest->queues = queues;
	atomic_set(&dest->marks, queues);
}

/* Sends a mark by each transmit queue. */
void mr_send_marks(struct mr_dest *dest)
{
	begin_marks(dest, READ_ONCE(dest->dev->real_num_tx_queues));
	dest->since_jiffies = jiffies;
	for (; dest->queue < dest->queues; dest->queue++)
		send_mark(dest, dest->queue);
}

/* Sends a mark by each queue of the channel. A full queue stops it: the next call goes on there. */
void mr_send_channel_marks(struct mr_dest *dest)
{
	if (!dest->queues)
		begin_marks(dest, mr_peer_queues(dest->peer));
	for (; dest->queue < dest->queues; dest->queue++) {
		if (mr_send_control(dest->peer, dest->queue, MR_NET_MARK, dest->token, 0))
			return;
	}
}

static void visit(struct work_struct *work)
{
	struct visit *visit = container_of(work, struct visit, work);
	/* Before the check: see wait_for_all_cpus(). */
	u32 check_id = smp_load_acquire(&visit->check_id);
	bool is_empty;

	local_bh_disable();
	is_empty = list_empty(&this_cpu_ptr(&softnet_data)->poll_list);
	local_bh_enable();
	if (!is_empty)
		return;
	/* After the packets that it delivered. */
	smp_store_release(&visit->idle_check_id, check_id);
	wake_up(&visit_queue);
}

/* Whether the current check of all CPUs has found that this one had nothing left to receive. */
static bool has_idled(unsigned int cpu)
{
	const struct visit *visit = per_cpu_ptr(&visits, cpu);

	/* Before the answer. */
	return smp_load_acquire(&visit->idle_check_id) == visit->check_id;
}

static bool have_all_idled(void)
{
	unsigned int cpu;

	for_each_online_cpu(cpu) {
		if (!has_idled(cpu))
			return false;
	}
	return true;
}

static void schedule_visits(void)
{
	unsigned int cpu;

	cpus_read_lock();
	for_each_online_cpu(cpu) {
		if (!has_idled(cpu))
			schedule_work_on(cpu, &per_cpu_ptr(&visits, cpu)->work);
	}
	cpus_read_unlock();
}

/* Waits until each CPU had nothing left to receive at some time, or until the deadline. */
static void wait_for_all_cpus(unsigned long deadline)
{
	unsigned int cpu;

	for_each_possible_cpu(cpu) {
		struct visit *visit = per_cpu_ptr(&visits, cpu);

		/* After the marks: a visit that already runs has checked too early. */
		smp_store_release(&visit->check_id, visit->check_id + 1);
	}
	do {
		schedule_visits();
		wait_event_idle_timeout(visit_queue, have_all_idled(), 1);
	} while (!have_all_idled() && time_before(jiffies, deadline));
}

/*
 * Waits until all packets that came before a mark are received. They may have come by the receive
 * queue of another CPU. When a task runs on that CPU, it has handled its interrupts, and its poll
 * list shows whether packets are left. Twice, since a CPU may have given packets to another (RPS).
 *
 * A CPU that receives all the time for VISIT_MS has handled its queues often. Limits: there is no
 * wait for a CPU that lets no task of ours run for that time, for NAPI in a thread, and for packets
 * that the host holds back.
 */
static void wait_for_receivers(void)
{
	unsigned long deadline = jiffies + msecs_to_jiffies(VISIT_MS);

	wait_for_all_cpus(deadline);
	wait_for_all_cpus(deadline);
}

static void send_answers(struct marks *batch, unsigned int index)
{
	unsigned int i;

	for (i = 0; i < batch->len; i++) {
		struct mr_peer *peer;

		rcu_read_lock_bh();
		/* A peer that goes down is waited for: see mr_move_peer_down(). */
		peer = READ_ONCE(mr_net_peers[index]);
		if (peer)
			mr_send_control(peer, 0, MR_NET_ARRIVED, batch->mark[i].token,
					batch->mark[i].count);
		rcu_read_unlock_bh();
	}
	batch->len = 0;
}

static void answer_all(struct work_struct *unused)
{
	unsigned int i, path, closed_set;

	spin_lock_bh(&marks_lock);
	closed_set = open_set;
	open_set ^= 1;
	spin_unlock_bh(&marks_lock);
	wait_for_receivers();
	for (path = 0; path < MR_MARK_PATHS; path++) {
		for (i = 0; i < MR_MAX_MEMBERS; i++)
			send_answers(&marks[closed_set][path][i], i);
	}
}

static DECLARE_DELAYED_WORK(work, answer_all);

static void add_mark(struct marks *to, u32 token)
{
	unsigned int i;

	for (i = 0; i < to->len; i++) {
		if (to->mark[i].token == token) {
			to->mark[i].count++;
			return;
		}
	}
	if (to->len < MAX_MARKS)
		to->mark[to->len++] = (struct mark){ .token = token, .count = 1 };
}

/* Handles a mark of the member at this index of the table. Softirq. */
void mr_mark_receive(enum mr_mark_path path, u32 index, u32 token)
{
	spin_lock(&marks_lock);
	add_mark(&marks[open_set][path][index], token);
	spin_unlock(&marks_lock);
	/* Delayed, to answer many marks of a sender at once. By any CPU: this one may be busy. */
	queue_delayed_work(system_unbound_wq, &work, 1);
}

static bool is_last(int remaining, u16 count)
{
	return remaining <= 0 && remaining + count > 0;
}

/*
 * Handles an answer to our marks, for @count queues more: all earlier packets of these queues have
 * arrived, too. Softirq.
 */
void mr_mark_receive_answer(u32 index, u32 token, u16 count)
{
	struct mr_dest *dest;
	unsigned int i;

	hash_for_each_rcu(mr_dests, i, dest, node) {
		if (dest->index == index && READ_ONCE(dest->token) == token &&
		    is_last(atomic_sub_return(count, &dest->marks), count))
			mr_move_schedule_work();
	}
}

void mr_mark_init(void)
{
	unsigned int cpu;

	for_each_possible_cpu(cpu)
		INIT_WORK(&per_cpu_ptr(&visits, cpu)->work, visit);
}

/* Cancels all work. No more marks arrive. */
void mr_mark_exit(void)
{
	unsigned int cpu;

	cancel_delayed_work_sync(&work);
	for_each_possible_cpu(cpu)
		cancel_work_sync(&per_cpu_ptr(&visits, cpu)->work);
}
