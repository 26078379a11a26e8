// SPDX-License-Identifier: GPL-2.0
/*
 * From a message to a packet that enters the stack above the link layer.
 *
 * The packet has the Ethernet header that it would have come with and the device it would have
 * come by, so that filters, PREROUTING and INPUT treat it like any other. It must be from an
 * address of the sending member to one of ours, by the host's table and not by the sender's memory.
 */
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/skbuff.h>
#include <linux/version.h>
#include <net/busy_poll.h>

#include "net.h"

#define MAX_LINEAR_LEN 2048 /* largest packet in one piece of memory */
#define HEAD_LEN 128 /* linear bytes of a larger packet: for the stack's headers */

/*
 * Memory of datagrams that one round receives: those beyond a socket's room (208 KiB by default)
 * would be lost. Small datagrams count for more than their memory, so that they fill a round.
 */
#define MAX_DATAGRAM_BYTES 131072

static struct list_head batches[MR_MAX_QUEUES];
static u32 datagram_bytes[MR_MAX_QUEUES]; /* in the batch */

static struct sk_buff *alloc_with_headroom(struct mr_rx *rx, u32 len)
{
	struct sk_buff *skb = napi_alloc_skb(mr_rx_napi(rx), ETH_HLEN + len);

	/* napi_alloc_skb() has aligned the bytes behind an Ethernet header. */
	if (skb)
		skb_reserve(skb, ETH_HLEN);
	return skb;
}

/* Makes a packet with a copy of the message. NULL: no memory. */
static struct sk_buff *build_copied(struct mr_rx *rx)
{
	u32 len = mr_rx_len(rx), off = HEAD_LEN;
	struct sk_buff *skb;
	unsigned int i;
	int err;

	if (len <= MAX_LINEAR_LEN) {
		skb = alloc_with_headroom(rx, len);
		if (skb)
			mr_rx_copy(rx, 0, __skb_put(skb, len), len);
		return skb;
	}
	skb = alloc_skb_with_frags(NET_SKB_PAD + ETH_HLEN + HEAD_LEN, len - HEAD_LEN,
				   PAGE_ALLOC_COSTLY_ORDER, &err, GFP_ATOMIC);
	if (!skb)
		return NULL;
	skb_reserve(skb, NET_SKB_PAD + ETH_HLEN);
	mr_rx_copy(rx, 0, __skb_put(skb, HEAD_LEN), HEAD_LEN);
	skb->data_len = len - HEAD_LEN;
	skb->len = len;
	for (i = 0; i < skb_shinfo(skb)->nr_frags; i++) {
		const skb_frag_t *frag = &skb_shinfo(skb)->frags[i];

		mr_rx_copy(rx, off, skb_frag_address(frag), skb_frag_size(frag));
		off += skb_frag_size(frag);
	}
	return skb;
}

/* Makes a packet with the sender's pages. NULL: the message has to be copied. */
static struct sk_buff *build_borrowed(struct mr_rx *rx)
{
	u32 head_len = mr_rx_head_len(rx);
	struct mr_sg sg[MR_MAX_SEGS];
	struct sk_buff *skb;
	unsigned int i, len;

	if (!mr_rx_segs(rx) || mr_rx_segs(rx) > MAX_SKB_FRAGS)
		return NULL;
	skb = alloc_with_headroom(rx, max_t(u32, head_len, HEAD_LEN));
	if (!skb)
		return NULL;
	len = mr_rx_borrow(rx, sg);
	if (!len) {
		kfree_skb(skb);
		return NULL;
	}
	mr_rx_copy(rx, 0, __skb_put(skb, head_len), head_len);
	for (i = 0; i < len; i++)
		skb_add_rx_frag(skb, i, sg[i].page, sg[i].off, sg[i].len, PAGE_SIZE);
	/* These pages are read-only here. */
	skb_shinfo(skb)->flags |= SKBFL_SHARED_FRAG;
	mr_count(MR_RX_BORROWED);
	return skb;
}

/*
 * Whether all packets of a device that are forwarded pass POST_ROUTING, where pages of peers are
 * replaced (channel_pages.c).
 */
static bool may_borrow(const struct net_device *dev)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 6, 0)
	if (rcu_access_pointer(dev->tcx_ingress))
		return false;
#else
	if (rcu_access_pointer(dev->miniq_ingress))
		return false;
#endif
#ifdef CONFIG_NETFILTER_INGRESS
	if (rcu_access_pointer(dev->nf_hooks_ingress))
		return false;
#endif
	/* A bridge, macvlan, bond. */
	return !rcu_access_pointer(dev->rx_handler);
}

/*
 * Builds a packet from a message, as if it had come by this device, with room for an Ethernet
 * header. NULL: no memory.
 */
struct sk_buff *mr_build_skb(struct mr_rx *rx, const struct net_device *dev)
{
	struct sk_buff *skb = may_borrow(dev) ? build_borrowed(rx) : NULL;

	return skb ? skb : build_copied(rx);
}

/* Whether a packet is from an address of the member to one of ours. Headers are in our memory. */
static bool has_right_addresses(const struct sk_buff *skb, const struct mr_node *node)
{
	struct in6_addr source, destination;

	mr_addresses(skb, &source, &destination);
	return mr_has_address(node->addresses, node->addresses_len, &source) &&
	       mr_is_own_address(&destination);
}

/* Our device by the Ethernet header, if that member may send to it; NULL: none. */
static struct net_device *find_device(const struct ethhdr *eth, const struct mr_node *node)
{
	const struct mr_self *self = rcu_dereference(mr_self);
	int index;

	if (!self || mr_find_mac(node->macs, node->macs_len, eth->h_source) < 0)
		return NULL;
	index = mr_find_mac(self->macs, self->macs_len, eth->h_dest);
	return index < 0 ? NULL : self->devs[index];
}

static void set_device(struct sk_buff *skb, struct net_device *dev, const struct mr_net_meta *meta)
{
	const struct ethhdr *eth = (const struct ethhdr *)meta->eth;

	skb->dev = dev;
	skb->protocol = eth->h_proto;
	memcpy(skb->data - ETH_HLEN, eth, ETH_HLEN);
	skb_set_mac_header(skb, -ETH_HLEN);
	skb_reset_mac_len(skb);
	skb_reset_network_header(skb);
	skb->pkt_type = PACKET_HOST;
}

/* Sets checksum and segmentation from a message. @min_csum_start: lowest offset of a checksum. */
bool mr_set_offloads(struct sk_buff *skb, const struct mr_net_meta *meta, u32 min_csum_start)
{
	struct virtio_net_hdr hdr;

	memcpy(&hdr, meta, sizeof(hdr));
	hdr.flags &= VIRTIO_NET_HDR_F_NEEDS_CSUM;
	if (hdr.flags && __virtio16_to_cpu(true, hdr.csum_start) < min_csum_start)
		return false;
	return !virtio_net_hdr_to_skb(skb, &hdr, true);
}

static void count_datagram(struct mr_rx *rx, const struct sk_buff *skb)
{
	u32 *bytes = &datagram_bytes[mr_rx_queue(rx)];

	*bytes += max_t(u32, skb->truesize, MAX_DATAGRAM_BYTES / NAPI_POLL_WEIGHT);
	if (*bytes >= MAX_DATAGRAM_BYTES)
		mr_rx_pause(rx);
}

static void receive_packet(struct mr_rx *rx, const struct mr_net_meta *meta)
{
	const struct mr_node *node = rcu_dereference(mr_nodes[mr_peer_index(mr_rx_peer(rx))]);
	struct net_device *dev = node ? find_device((const struct ethhdr *)meta->eth, node) : NULL;
	struct mr_headers headers = {};
	struct sk_buff *skb;

	if (!dev || mr_rx_len(rx) < sizeof(struct iphdr)) {
		mr_count(MR_RX_BAD);
		return;
	}
	skb = mr_build_skb(rx, dev);
	if (!skb) {
		mr_count(MR_RX_MEMORY);
		return;
	}
	set_device(skb, dev, meta);
	headers.version = skb->protocol;
	if (!mr_pull_headers(skb, &headers) || !has_right_addresses(skb, node) ||
	    !mr_set_offloads(skb, meta, headers.transport)) {
		mr_count(MR_RX_BAD);
		kfree_skb(skb);
		return;
	}
	if (!mr_is_for_socket(skb, &headers) && mr_own_pages(skb)) {
		mr_count(MR_RX_MEMORY);
		kfree_skb(skb);
		return;
	}
	if (meta->hash)
		skb_set_hash(skb, le32_to_cpu(meta->hash), PKT_HASH_TYPE_L4);
	skb_record_rx_queue(skb, mr_rx_queue(rx) % skb->dev->real_num_rx_queues);
	skb_mark_napi_id(skb, mr_rx_napi(rx));
	list_add_tail(&skb->list, &batches[mr_rx_queue(rx)]);
	if (headers.protocol == IPPROTO_UDP)
		count_datagram(rx, skb);
	mr_count(MR_RX);
}

/* Receives a message of a peer: a packet, a mark or an answer. Softirq. */
void mr_receive(struct mr_rx *rx)
{
	const struct mr_net_meta *meta = mr_rx_meta(rx);

	if (meta->flags & MR_NET_CONTROL) {
		u32 index = mr_peer_index(mr_rx_peer(rx)), token = le32_to_cpu(meta->hash);

		if (meta->gso_type == MR_NET_ARRIVED)
			mr_mark_receive_answer(index, token, le16_to_cpu(meta->gso_size));
		if (meta->gso_type == MR_NET_MARK)
			mr_mark_receive(MR_MARK_MESSAGE, index, token);
		return;
	}
	receive_packet(rx, meta);
}

/* Gives the packets to the stack. Softirq. */
void mr_batch_deliver(struct list_head *batch)
{
	if (!list_empty(batch)) {
		netif_receive_skb_list(batch);
		INIT_LIST_HEAD(batch);
	}
}

/* Drops packets behind the client's last batch. */
void mr_batch_drop(struct list_head *batch)
{
	struct sk_buff *skb, *next;

	list_for_each_entry_safe(skb, next, batch, list) {
		skb_list_del_init(skb);
		kfree_skb(skb);
	}
}

void mr_received(unsigned int queue)
{
	mr_batch_deliver(&batches[queue]);
	datagram_bytes[queue] = 0;
}

/* Records a mark of the member with an id, if the member may send to this device. */
static void record_mark(u32 id, const struct sk_buff *skb, const struct net_device *dev, u32 token)
{
	unsigned int i;

	for (i = 0; i < MR_MAX_MEMBERS; i++) {
		const struct mr_node *node = rcu_dereference(mr_nodes[i]);

		/* Not from another namespace, whose owner chooses the addresses there. */
		if (node && node->id == id && find_device(eth_hdr(skb), node) == dev)
			mr_mark_receive(MR_MARK_FRAME, i, token);
	}
}

/* Handles a mark's frame: all earlier packets of its sender have arrived, too. */
static int receive_mark_frame(struct sk_buff *skb, struct net_device *dev, struct packet_type *type,
			      struct net_device *orig_dev)
{
	const struct mr_self *self;
	struct mr_net_mark buffer;
	const struct mr_net_mark *mark = skb_header_pointer(skb, 0, sizeof(buffer), &buffer);

	rcu_read_lock();
	self = rcu_dereference(mr_self);
	if (mark && self && skb->pkt_type == PACKET_HOST && skb_mac_header_len(skb) >= ETH_HLEN &&
	    le32_to_cpu(mark->magic) == MR_NET_MAGIC && le32_to_cpu(mark->to_id) == self->id)
		record_mark(le32_to_cpu(mark->from_id), skb, dev, le32_to_cpu(mark->token));
	rcu_read_unlock();
	kfree_skb(skb);
	return NET_RX_SUCCESS;
}

static struct packet_type mark_type = {
	.type = htons(MR_NET_ETHERTYPE),
	.func = receive_mark_frame,
};

void mr_receive_init(void)
{
	unsigned int i;

	for (i = 0; i < MR_MAX_QUEUES; i++)
		INIT_LIST_HEAD(&batches[i]);
	mr_mark_init();
	dev_add_pack(&mark_type);
}

void mr_receive_exit(void)
{
	unsigned int i;

	dev_remove_pack(&mark_type);
	mr_mark_exit();
	for (i = 0; i < MR_MAX_QUEUES; i++)
		mr_batch_drop(&batches[i]);
}
