// SPDX-License-Identifier: GPL-2.0
/*
 * Marks: frames of their own by which a guest learns that everything it sent before them by the
 * ordinary way has arrived. Why: net_move.c.
 */
#include <linux/etherdevice.h>
#include <linux/netdevice.h>
#include <net/sch_generic.h>

#include "net.h"

/* Whether nothing waits in its queueing disciplines. */
bool mr_are_queues_empty(const struct net_device *dev)
{
	unsigned int i, len = 0;

	rcu_read_lock();
	for (i = 0; i < READ_ONCE(dev->real_num_tx_queues); i++)
		len += qdisc_qlen_sum(rcu_dereference(netdev_get_tx_queue(dev, i)->qdisc));
	rcu_read_unlock();
	return !len;
}

/* By the ordinary way, behind everything that this transmit queue was given. */
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

	/* The host may have taken us off its table since the move began. */
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

/* By each transmit queue. */
void mr_send_marks(struct mr_dest *dest)
{
	unsigned int i, queues = READ_ONCE(dest->dev->real_num_tx_queues);

	atomic_set(&dest->marks, queues);
	dest->marked = true;
	dest->since = jiffies;
	for (i = 0; i < queues; i++)
		send_mark(dest, i);
}

/* Tells a member over the channel that its mark came by the ordinary way. Softirq. */
void mr_mark_reply(u32 id, u32 token)
{
	unsigned int i;

	for (i = 0; i < MR_MAX_MEMBERS; i++) {
		const struct mr_node *node = rcu_dereference(mr_nodes[i]);
		struct mr_peer *peer = READ_ONCE(mr_net_peers[i]);

		/* A peer that goes is waited for: see mr_move_peer_down(). */
		if (node && node->id == id && peer)
			mr_send_control(peer, MR_NET_ARRIVED, token);
	}
}
