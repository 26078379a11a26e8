// SPDX-License-Identifier: GPL-2.0
/*
 * From a packet to a message.
 *
 * Pages are passed by reference from refer_bytes on, unless somebody may still write to them:
 * those of sendfile() and splice() belong to a file, those of MSG_ZEROCOPY to a program. These
 * are copied, as a network card would have done. So are datagrams that were made for fragments,
 * whose memory would come and go too often, and what has more bytes in front than a slot takes.
 */
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/version.h>
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 5, 0)
#include <net/gso.h>
#endif

#include "net.h"

#define MAX_PIECES 72 /* of a datagram that was made for fragments: 64 KiB by 1,500 and some */

static unsigned int refer_bytes = 4096;
module_param(refer_bytes, uint, 0644);
MODULE_PARM_DESC(refer_bytes, "least bytes of a packet whose pages pass by reference (4096)");

static struct mr_backlog backlogs[MR_MAX_MEMBERS][MR_MAX_QUEUES];

struct pieces {
	unsigned int len;
	struct mr_sg sg[MAX_PIECES];
};

static bool add_piece(struct pieces *pieces, struct page *page, u32 off, u32 len)
{
	if (!len)
		return true;
	if (pieces->len == MAX_PIECES)
		return false;
	pieces->sg[pieces->len++] = (struct mr_sg){ .page = page, .off = off, .len = len };
	return true;
}

static bool add_frags(struct pieces *pieces, const struct sk_buff *skb)
{
	unsigned int i;

	for (i = 0; i < skb_shinfo(skb)->nr_frags; i++) {
		const skb_frag_t *frag = &skb_shinfo(skb)->frags[i];

		if (!add_piece(pieces, skb_frag_page(frag), skb_frag_off(frag),
			       skb_frag_size(frag)))
			return false;
	}
	return true;
}

/* Collects all bytes behind the first headlen. */
static bool collect(struct pieces *pieces, const struct sk_buff *skb)
{
	const struct sk_buff *part;

	pieces->len = 0;
	if (!add_frags(pieces, skb))
		return false;
	skb_walk_frags(skb, part) {
		if (skb_has_frag_list(part) ||
		    !add_piece(pieces, virt_to_page(part->data), offset_in_page(part->data),
			       skb_headlen(part)) ||
		    !add_frags(pieces, part))
			return false;
	}
	return true;
}

static bool may_refer(struct sk_buff *skb)
{
	return skb->len >= READ_ONCE(refer_bytes) && !skb_has_frag_list(skb) &&
	       !skb_has_shared_frag(skb) && !skb_zcopy(skb);
}

static bool fill_meta(struct mr_net_meta *meta, struct sk_buff *skb)
{
	struct virtio_net_hdr hdr;

	BUILD_BUG_ON(sizeof(*meta) != MR_META_LEN);
	if (virtio_net_hdr_from_skb(skb, &hdr, true, false, 0))
		return false;
	memset(meta, 0, sizeof(*meta));
	memcpy(meta, &hdr, sizeof(hdr));
	meta->hash = cpu_to_le32(skb_get_hash_raw(skb));
	return true;
}

/* @eth: the Ethernet header, where the packet's bytes do not begin with it. */
static int send_message(struct mr_peer *peer, unsigned int queue, struct sk_buff *skb, u8 client,
			const u8 *eth)
{
	struct pieces pieces;
	struct mr_net_meta meta;
	struct mr_tx tx = {
		.client = client,
		.may_refer = may_refer(skb),
		.meta = &meta,
		.head = skb->data,
		.head_len = skb_headlen(skb),
		.sg = pieces.sg,
		.len = skb->len,
	};

	if (!collect(&pieces, skb) || !fill_meta(&meta, skb))
		return -EMSGSIZE;
	if (eth)
		memcpy(meta.eth, eth, ETH_HLEN);
	tx.sg_len = pieces.len;
	return mr_send(peer, queue, &tx);
}

/* Chooses the queue of a flow, one for all its packets: it keeps their order. */
static unsigned int choose_queue(const struct mr_peer *peer, struct sk_buff *skb)
{
	unsigned int queues = mr_peer_queues(peer);

	return queues > 1 ? skb_get_hash(skb) % queues : 0;
}

/* Sends a frame of the device, which stays the caller's. */
int mr_send_frame(struct mr_peer *peer, struct sk_buff *skb)
{
	return send_message(peer, choose_queue(peer, skb), skb, MR_CLIENT_DEVICE, NULL);
}

static int send_packet(const struct mr_dest *dest, struct sk_buff *skb, unsigned int queue)
{
	return send_message(dest->peer, queue, skb, MR_CLIENT_NET, dest->eth);
}

static void finish_sent(struct sk_buff *skb)
{
	mr_count(MR_TAKEN);
	consume_skb(skb);
}

static int send_now(struct mr_dest *dest, struct sk_buff *skb, unsigned int queue)
{
	int err = send_packet(dest, skb, queue);

	if (!err)
		finish_sent(skb);
	return err;
}

/*
 * Destination of a packet in the backlog: it is freed only after its peer's backlog was flushed.
 */
static struct mr_dest **waiting_dest(struct sk_buff *skb)
{
	/* The IP layers' part of cb, with the flag that POST_ROUTING is over, comes first. */
	BUILD_BUG_ON(sizeof(struct inet6_skb_parm) + sizeof(void *) > sizeof(skb->cb));
	return (struct mr_dest **)(skb->cb + sizeof(skb->cb) - sizeof(void *));
}

/* Sends a packet, or queues it behind packets that wait. -ENOBUFS: too many wait. */
static int send_or_queue(struct mr_backlog *backlog, struct mr_dest *dest, struct sk_buff *skb,
			 unsigned int queue)
{
	int err = -ENOSPC;

	spin_lock_bh(&backlog->lock);
	if (skb_queue_empty(&backlog->skbs))
		err = send_now(dest, skb, queue);
	if (err == -ENOSPC) {
		err = -ENOBUFS;
		if (skb_queue_len(&backlog->skbs) < MR_NET_MAX_BACKLOG) {
			skb_dst_force(skb);
			*waiting_dest(skb) = dest;
			__skb_queue_tail(&backlog->skbs, skb);
			mr_count(MR_WAITED);
			err = 0;
		}
	}
	spin_unlock_bh(&backlog->lock);
	return err;
}

/* Sends the segments of datagrams that were sent as one: some kernels cannot receive them so. */
static int send_segments(struct mr_dest *dest, struct sk_buff *skb)
{
	struct sk_buff *segment, *next, *list;

	list = skb_gso_segment(skb, NETIF_F_SG | NETIF_F_HW_CSUM);
	if (IS_ERR_OR_NULL(list))
		return -EMSGSIZE;
	consume_skb(skb);
	skb_list_walk_safe(list, segment, next) {
		skb_mark_not_on_list(segment);
		mr_send_skb_or_ordinary(dest, segment);
	}
	return 0;
}

/*
 * Sends a packet by the channel. 0: it belongs to the channel. Else it stays the caller's:
 * -ENOBUFS, too many wait; -ENOTCONN, no link; -EMSGSIZE, no message can describe it.
 *
 * A packet that waits keeps its socket's memory charged, so a full ring slows the sender down
 * and nothing is dropped for it.
 */
int mr_send_skb(struct mr_dest *dest, struct sk_buff *skb)
{
	unsigned int queue = choose_queue(dest->peer, skb);
	struct mr_backlog *backlog = &backlogs[dest->index][queue];
	int err = -ENOSPC;

	if (skb_is_gso(skb) && skb_shinfo(skb)->gso_type & SKB_GSO_UDP_L4)
		return send_segments(dest, skb);
	if (skb_queue_empty_lockless(&backlog->skbs))
		err = send_now(dest, skb, queue);
	return err == -ENOSPC ? send_or_queue(backlog, dest, skb, queue) : err;
}

/*
 * Sends a packet that its sender cannot take back. Where too many wait it is dropped, as the hook
 * does: the ordinary way would let it overtake these.
 */
void mr_send_skb_or_ordinary(struct mr_dest *dest, struct sk_buff *skb)
{
	int err = mr_send_skb(dest, skb);

	if (err == -ENOBUFS) {
		mr_count(MR_OVERFLOW);
		kfree_skb(skb);
	} else if (err) {
		mr_send_ordinary(skb);
	}
}

/*
 * Sends waiting packets: the ring has room again. Softirq.
 *
 * A packet leaves the list after it is in the ring, not before: whoever sees an empty list,
 * without the lock, sends at once, and may not overtake it.
 */
void mr_backlog_writable(struct mr_peer *peer, unsigned int queue)
{
	struct mr_backlog *backlog = &backlogs[mr_peer_index(peer)][queue];
	struct sk_buff *skb;
	int err;

	spin_lock(&backlog->lock);
	/* No doorbell comes for those behind one that cannot be described. */
	while ((skb = skb_peek(&backlog->skbs))) {
		err = send_packet(*waiting_dest(skb), skb, queue);
		if (err == -ENOSPC)
			break;
		__skb_unlink(skb, &backlog->skbs);
		if (err)
			mr_send_ordinary(skb);
		else
			finish_sent(skb);
	}
	spin_unlock(&backlog->lock);
}

static bool has_waiting(struct mr_backlog *backlog, const struct mr_dest *dest)
{
	struct sk_buff *skb;

	lockdep_assert_held(&backlog->lock);
	skb_queue_walk(&backlog->skbs, skb) {
		if (*waiting_dest(skb) == dest)
			return true;
	}
	return false;
}

/* Whether all waiting packets are in the rings, as any later check of the rings sees. */
bool mr_backlog_is_empty(const struct mr_dest *dest)
{
	bool empty = true;
	unsigned int i;

	for (i = 0; i < MR_MAX_QUEUES && empty; i++) {
		struct mr_backlog *backlog = &backlogs[dest->index][i];

		spin_lock_bh(&backlog->lock);
		empty = !has_waiting(backlog, dest);
		spin_unlock_bh(&backlog->lock);
	}
	return empty;
}

static void take_waiting(struct mr_backlog *backlog, const struct mr_dest *dest,
			 struct sk_buff_head *skbs)
{
	struct sk_buff *skb, *next;

	spin_lock_bh(&backlog->lock);
	skb_queue_walk_safe(&backlog->skbs, skb, next) {
		if (dest && *waiting_dest(skb) != dest)
			continue;
		__skb_unlink(skb, &backlog->skbs);
		__skb_queue_tail(skbs, skb);
	}
	spin_unlock_bh(&backlog->lock);
}

/*
 * Sends waiting packets of a destination the ordinary way; with NULL, where the link is down, those
 * of all destinations.
 */
void mr_backlog_flush(u32 index, const struct mr_dest *dest)
{
	struct sk_buff_head skbs;
	struct sk_buff *skb;
	unsigned int i;

	for (i = 0; i < MR_MAX_QUEUES; i++) {
		__skb_queue_head_init(&skbs);
		take_waiting(&backlogs[index][i], dest, &skbs);
		local_bh_disable();
		while ((skb = __skb_dequeue(&skbs)))
			mr_send_ordinary(skb);
		local_bh_enable();
	}
}

void mr_backlog_init(void)
{
	unsigned int i, k;

	for (i = 0; i < MR_MAX_MEMBERS; i++) {
		for (k = 0; k < MR_MAX_QUEUES; k++) {
			spin_lock_init(&backlogs[i][k].lock);
			__skb_queue_head_init(&backlogs[i][k].skbs);
		}
	}
}

/*
 * Sends a message between the clients themselves. It is lost when the ring is full: the waiting
 * side repeats its mark, or goes on after some time.
 */
int mr_send_control(struct mr_peer *peer, unsigned int queue, u8 type, u32 token, u16 count)
{
	struct mr_net_meta meta = {
		.flags = MR_NET_CONTROL,
		.gso_type = type,
		.gso_size = cpu_to_le16(count),
		.hash = cpu_to_le32(token),
	};
	struct mr_tx tx = {
		.client = MR_CLIENT_NET,
		.meta = &meta,
		.head = &meta,
	};

	return mr_send(peer, queue, &tx);
}
