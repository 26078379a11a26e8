// SPDX-License-Identifier: GPL-2.0
/*
 * Changing the path of a destination's packets without changing their order.
 *
 * Onto the channel: packets are held, and a *mark* (a frame of its own) is sent by each transmit
 * queue of the ordinary way. It arrives behind all earlier packets; the peer says so over the
 * channel, once each of its CPUs has handled what it received (net_mark.c). Then the held packets
 * follow by the channel. A mark that is not answered within MARK_MS sends the held packets the
 * ordinary way, and the next try waits longer each time.
 *
 * A queueing discipline with more than one queue (fq_codel, fq, pfifo_fast) might let a mark
 * overtake, so the marks wait until it is empty. Packets of others may keep it full: after
 * QUEUE_MS the marks go all the same. Then a packet that waited there for longer may come late.
 *
 * Off the channel: packets are held until the peer has answered marks in its rings, has taken
 * everything out of them and goes, or is gone; then they follow the ordinary way.
 *
 * A destination goes onto the channel when a packet wants to go there, its link is up, and the
 * neighbour that this guest learned by ARP or NDP has an address which the host's member table
 * gives to that member. It goes off when any of these ends.
 */
#include <linux/jiffies.h>
#include <linux/module.h>
#include <linux/rculist.h>
#include <net/arp.h>
#include <net/ndisc.h>
#include <net/netevent.h>

#include "net.h"

#define MARK_MS 100
#define QUEUE_MS 20 /* four times what fq_codel lets a packet wait */
#define DRAIN_MS 200
#define RETRY_MS 200 /* doubled with each failure */
#define MAX_FAILURES 8 /* doublings */
#define STEP_MS 2 /* while something changes */

struct mr_peer *mr_net_peers[MR_MAX_MEMBERS];

static void move_work(struct work_struct *work);
static DECLARE_DELAYED_WORK(work, move_work);
static DEFINE_SPINLOCK(work_lock); /* held from the check of `stopping` to the queueing */
static bool stopping;
static bool enabled = true;

static bool is_off(void)
{
	return READ_ONCE(stopping) || !READ_ONCE(enabled);
}

/* Schedules the work on any CPU: the caller's may be busy. */
static void schedule_work_in(unsigned int ms)
{
	unsigned long flags;

	spin_lock_irqsave(&work_lock, flags);
	/* An earlier run stays. */
	if (!stopping && ms)
		queue_delayed_work(system_unbound_wq, &work, msecs_to_jiffies(ms));
	else if (!stopping)
		mod_delayed_work(system_unbound_wq, &work, 0);
	spin_unlock_irqrestore(&work_lock, flags);
}

void mr_move_schedule_work(void)
{
	schedule_work_in(0);
}

static void set_path(struct mr_dest *dest, enum mr_path path)
{
	lockdep_assert_held(&dest->lock);
	WRITE_ONCE(dest->path, path);
	dest->since_jiffies = jiffies;
}

static bool is_older(const struct mr_dest *dest, unsigned int ms)
{
	return time_after(jiffies, dest->since_jiffies + msecs_to_jiffies(ms));
}

/* Looks up the valid entry of ARP or NDP for an address; held. NULL: none. */
static struct neighbour *lookup_neighbour(const struct mr_dest *dest, struct net_device *dev,
					  u8 *mac)
{
	bool v4 = ipv6_addr_v4mapped(&dest->address);
	struct neighbour *neigh = v4 ? neigh_lookup(&arp_tbl, &dest->address.s6_addr32[3], dev) :
				       neigh_lookup(&nd_tbl, &dest->address, dev);

	if (!neigh)
		return NULL;
	if (!(READ_ONCE(neigh->nud_state) & NUD_VALID)) {
		neigh_release(neigh);
		return NULL;
	}
	neigh_ha_snapshot(mac, neigh, dev);
	return neigh;
}

static bool is_member_mac(const struct mr_dest *dest, const u8 *mac)
{
	const struct mr_node *node = rcu_dereference_protected(mr_nodes[dest->index],
							       lockdep_is_held(&mr_net_lock));

	return node && mr_find_mac(node->macs, node->macs_len, mac) >= 0;
}

static bool is_own_device(const struct net_device *dev)
{
	const struct mr_self *self = rcu_dereference_protected(mr_self,
							       lockdep_is_held(&mr_net_lock));
	u32 i;

	for (i = 0; self && i < self->macs_len; i++) {
		if (self->devs[i] == dev)
			return true;
	}
	return false;
}

/* Confirms that both sources agree: the neighbour's address and the member table's. */
static bool confirm(struct mr_dest *dest)
{
	struct net_device *dev = dev_get_by_index(&init_net, dest->request_ifindex);
	struct neighbour *neigh = NULL;
	u8 mac[MAX_ADDR_LEN];

	if (!dev)
		return false;
	if (is_own_device(dev))
		neigh = lookup_neighbour(dest, dev, mac);
	if (!neigh || !is_member_mac(dest, mac)) {
		if (neigh)
			neigh_release(neigh);
		dev_put(dev);
		return false;
	}
	WRITE_ONCE(dest->dev, dev);
	dest->neigh = neigh;
	memcpy(dest->eth, mac, ETH_ALEN);
	memcpy(dest->eth + ETH_ALEN, dev->dev_addr, ETH_ALEN);
	put_unaligned_be16(ipv6_addr_v4mapped(&dest->address) ? ETH_P_IP : ETH_P_IPV6,
			   dest->eth + 2 * ETH_ALEN);
	return true;
}

/* Whether the confirmed facts still hold. */
static bool are_facts_valid(struct mr_dest *dest)
{
	u8 mac[MAX_ADDR_LEN];

	if (mr_net_peers[dest->index] != dest->peer || is_off())
		return false;
	if (!xchg(&dest->needs_recheck, false))
		return true;
	if (dest->neigh->dead || !(READ_ONCE(dest->neigh->nud_state) & NUD_VALID))
		return false;
	neigh_ha_snapshot(mac, dest->neigh, dest->dev);
	return ether_addr_equal(mac, dest->eth) && is_member_mac(dest, mac) &&
	       is_own_device(dest->dev) &&
	       ether_addr_equal(dest->dev->dev_addr, dest->eth + ETH_ALEN);
}

static void release_refs(struct mr_dest *dest)
{
	neigh_release(dest->neigh);
	dev_put(dest->dev);
	mr_peer_put(dest->peer);
	dest->neigh = NULL;
	WRITE_ONCE(dest->dev, NULL);
	dest->peer = NULL;
}

static void begin_move(struct mr_dest *dest)
{
	dest->peer = mr_net_peers[dest->index];
	mr_peer_get(dest->peer);
	mr_renew_marks(dest);
	/* A change between confirm()'s check and now has not found the destination. */
	WRITE_ONCE(dest->needs_recheck, true);
	spin_lock_bh(&dest->lock);
	set_path(dest, MR_PATH_TO_CHANNEL);
	spin_unlock_bh(&dest->lock);
	/* Senders that saw the old path have sent their packets and made their requests. */
	synchronize_net();
	WRITE_ONCE(dest->request_ifindex, 0);
}

/* Changes the path, and sends held packets by it. */
static void release_held(struct mr_dest *dest, enum mr_path path)
{
	struct sk_buff *skb;

	/* Later senders wait for the lock, or queue behind: see net_hook.c. */
	spin_lock_bh(&dest->lock);
	while ((skb = __skb_dequeue(&dest->held_skbs))) {
		if (path == MR_PATH_CHANNEL)
			mr_send_skb_or_ordinary(dest, skb);
		else
			mr_send_ordinary(skb);
	}
	set_path(dest, path);
	spin_unlock_bh(&dest->lock);
}

static void note_failure(struct mr_dest *dest)
{
	unsigned int ms = RETRY_MS << dest->failures;

	dest->failures = min(dest->failures + 1, MAX_FAILURES + 0u);
	dest->retry_jiffies = jiffies + msecs_to_jiffies(ms);
}

static void step_ordinary(struct mr_dest *dest)
{
	if (!READ_ONCE(dest->request_ifindex) || !mr_net_peers[dest->index] || is_off())
		return;
	if (time_before(jiffies, dest->retry_jiffies)) {
		/* The request is older than that time. The next packet after it makes a new one. */
		WRITE_ONCE(dest->request_ifindex, 0);
		return;
	}
	if (!rcu_access_pointer(mr_self) || !confirm(dest)) {
		/* The next packet makes a new request. */
		WRITE_ONCE(dest->request_ifindex, 0);
		note_failure(dest);
		return;
	}
	WRITE_ONCE(dest->request_ifindex, 0);
	begin_move(dest);
}

static void step_to_channel(struct mr_dest *dest)
{
	bool is_valid = are_facts_valid(dest);

	if (is_valid && !mr_is_marked(dest) &&
	    (mr_are_queues_empty(dest->dev) || is_older(dest, QUEUE_MS)))
		mr_send_marks(dest);
	if (is_valid && mr_are_marks_answered(dest)) {
		dest->failures = 0;
		release_held(dest, MR_PATH_CHANNEL);
	} else if (!is_valid || (mr_is_marked(dest) && is_older(dest, MARK_MS))) {
		release_held(dest, MR_PATH_ORDINARY);
		note_failure(dest);
		release_refs(dest);
	}
}

/*
 * Whether the peer has taken all messages, or had enough time for it. The backlog comes first: its
 * packets go into the rings, and none comes back.
 */
static bool is_ring_drained(const struct mr_dest *dest)
{
	return is_older(dest, DRAIN_MS) ||
	       (mr_backlog_is_empty(dest) && mr_peer_is_idle(dest->peer));
}

/* Whether the peer has given all messages to its stack. One that goes down gets no marks. */
static bool is_drained(struct mr_dest *dest)
{
	if (mr_net_peers[dest->index] != dest->peer || is_older(dest, DRAIN_MS))
		return is_ring_drained(dest);
	if (!mr_is_marked(dest) && mr_backlog_is_empty(dest))
		mr_send_channel_marks(dest);
	return mr_are_marks_answered(dest);
}

static void leave_channel(struct mr_dest *dest)
{
	mr_backlog_flush(dest->index, dest);
	release_held(dest, MR_PATH_ORDINARY);
	release_refs(dest);
}

static void hold_packets(struct mr_dest *dest)
{
	mr_renew_marks(dest);
	spin_lock_bh(&dest->lock);
	set_path(dest, MR_PATH_TO_ORDINARY);
	spin_unlock_bh(&dest->lock);
}

static void step_channel(struct mr_dest *dest)
{
	if (are_facts_valid(dest))
		return;
	hold_packets(dest);
	/* Senders that saw the old path have put their packets into the ring. */
	synchronize_net();
}

static void step_to_ordinary(struct mr_dest *dest)
{
	if (!is_drained(dest))
		return;
	leave_channel(dest);
	dest->retry_jiffies = jiffies + msecs_to_jiffies(RETRY_MS);
}

/* Does the next step of a destination. True: it is between two paths. */
static bool step(struct mr_dest *dest)
{
	if (dest->path == MR_PATH_ORDINARY)
		step_ordinary(dest);
	if (dest->path == MR_PATH_TO_CHANNEL)
		step_to_channel(dest);
	if (dest->path == MR_PATH_CHANNEL)
		step_channel(dest);
	if (dest->path == MR_PATH_TO_ORDINARY)
		step_to_ordinary(dest);
	return dest->path == MR_PATH_TO_CHANNEL || dest->path == MR_PATH_TO_ORDINARY;
}

/* Does the next step of all destinations. True: some are between two paths. */
static bool step_all(void)
{
	struct mr_dest *dest;
	bool is_moving = false;
	unsigned int i;

	mutex_lock(&mr_net_lock);
	hash_for_each(mr_dests, i, dest, node)
		is_moving |= step(dest);
	mutex_unlock(&mr_net_lock);
	return is_moving;
}

static void move_work(struct work_struct *unused)
{
	if (step_all())
		schedule_work_in(STEP_MS);
}

static void work_stop(void)
{
	unsigned long flags;

	spin_lock_irqsave(&work_lock, flags);
	WRITE_ONCE(stopping, true);
	spin_unlock_irqrestore(&work_lock, flags);
	cancel_delayed_work_sync(&work);
}

/* Brings a destination that the table removes to the ordinary way. No lookup finds it any more. */
void mr_move_retire(struct mr_dest *dest)
{
	lockdep_assert_held(&mr_net_lock);
	if (dest->path == MR_PATH_ORDINARY)
		return;
	if (dest->path == MR_PATH_CHANNEL)
		hold_packets(dest);
	/* An answer would no longer find it. */
	while (dest->path == MR_PATH_TO_ORDINARY && !is_ring_drained(dest))
		schedule_timeout_idle(1);
	leave_channel(dest);
}

void mr_move_peer_up(struct mr_peer *peer)
{
	struct mr_dest *dest;
	unsigned int i;

	mutex_lock(&mr_net_lock);
	hash_for_each(mr_dests, i, dest, node) {
		if (dest->index == mr_peer_index(peer))
			mr_dest_reset_retry(dest);
	}
	mr_peer_get(peer);
	WRITE_ONCE(mr_net_peers[mr_peer_index(peer)], peer);
	mutex_unlock(&mr_net_lock);
	mr_move_schedule_work();
}

void mr_move_peer_down(struct mr_peer *peer)
{
	u32 index = mr_peer_index(peer);
	struct mr_dest *dest;
	unsigned int i;

	mutex_lock(&mr_net_lock);
	if (mr_net_peers[index] == peer) {
		WRITE_ONCE(mr_net_peers[index], NULL);
		/* Later senders must not overtake packets that wait. */
		hash_for_each(mr_dests, i, dest, node) {
			if (dest->peer == peer && dest->path == MR_PATH_CHANNEL)
				hold_packets(dest);
		}
		synchronize_net();
		mr_backlog_flush(index, NULL);
		mr_peer_put(peer);
	}
	mutex_unlock(&mr_net_lock);
	mr_move_schedule_work();
}

/* A neighbour changed: check the destinations that rely on it again. Softirq or task. */
static int neighbour_event(struct notifier_block *nb, unsigned long event, void *data)
{
	struct neighbour *neigh = data;
	struct mr_dest *dest;
	unsigned int i;
	bool found = false;

	if (event != NETEVENT_NEIGH_UPDATE)
		return NOTIFY_DONE;
	rcu_read_lock();
	hash_for_each_rcu(mr_dests, i, dest, node) {
		if (READ_ONCE(dest->neigh) == neigh) {
			WRITE_ONCE(dest->needs_recheck, true);
			found = true;
		}
	}
	rcu_read_unlock();
	if (found)
		mr_move_schedule_work();
	return NOTIFY_DONE;
}

/* Checks all destinations again: a fact that they rely on has changed. */
void mr_move_recheck(void)
{
	struct mr_dest *dest;
	unsigned int i;

	rcu_read_lock();
	hash_for_each_rcu(mr_dests, i, dest, node)
		WRITE_ONCE(dest->needs_recheck, true);
	rcu_read_unlock();
	mr_move_schedule_work();
}

static int set_enabled(const char *value, const struct kernel_param *param)
{
	int err = param_set_bool(value, param);

	mr_move_recheck();
	return err;
}

static const struct kernel_param_ops enabled_ops = {
	.set = set_enabled,
	.get = param_get_bool,
};
module_param_cb(enabled, &enabled_ops, &enabled, 0644);
MODULE_PARM_DESC(enabled, "whether packets are taken; N brings all back to the ordinary way (Y)");

static struct notifier_block neighbour_notifier = { .notifier_call = neighbour_event };

int mr_move_init(void)
{
	return register_netevent_notifier(&neighbour_notifier);
}

/* Brings all destinations back to the ordinary way, in order. The hooks are still registered. */
void mr_move_stop(void)
{
	work_stop();
	while (step_all())
		schedule_timeout_idle(1);
	/* Packets that other senders leave with nf_queue now are dropped with the hooks. */
	synchronize_net();
}

/* Frees all destinations and peers. The hooks and the client are unregistered. */
void mr_move_exit(void)
{
	unsigned int i;

	unregister_netevent_notifier(&neighbour_notifier);
	work_stop();
	mr_table_clear();
	for (i = 0; i < MR_MAX_MEMBERS; i++) {
		struct mr_peer *peer = mr_net_peers[i];

		mr_backlog_flush(i, NULL);
		if (!peer)
			continue;
		WRITE_ONCE(mr_net_peers[i], NULL);
		synchronize_net();
		mr_peer_put(peer);
	}
}
