/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Declarations that the files of millrace_net share. Theory of operation: net_main.c.
 */
#ifndef MILLRACE_NET_INTERNAL_H
#define MILLRACE_NET_INTERNAL_H

#include <linux/etherdevice.h>
#include <linux/hashtable.h>
#include <linux/if_ether.h>
#include <linux/mutex.h>
#include <linux/netdevice.h>
#include <linux/percpu.h>
#include <linux/ip.h>
#include <linux/skbuff.h>
#include <linux/virtio_net.h>
#include <net/ipv6.h>
#include <net/neighbour.h>

#include "include/millrace_channel.h"

#define MR_NET_BITS 8 /* log2 of hash buckets for destinations: at most 31 members' 16 addresses */
#define MR_NET_MAX_BACKLOG 1000 /* packets that wait for room, per peer and queue: a txqueuelen */
#define MR_NET_MAX_HELD 1000 /* packets of one destination while it changes its path */

/* Reasons why a packet to a member went the ordinary way; the names are in net_debugfs.c. */
enum mr_reason {
	MR_TAKEN,
	MR_HELD, /* taken, after the destination has changed its path */
	MR_WAITED, /* taken, once the ring had room */
	MR_NOT_CONFIRMED, /* neighbour and member table do not (yet) agree */
	MR_PROTOCOL, /* neither TCP nor UDP, or options, or a fragment */
	MR_ROUTE, /* another device, a gateway, IPsec, a tunnel */
	MR_SOURCE, /* source address is not ours by the member table */
	MR_EGRESS, /* the device has egress filters or a qdisc that shapes */
	MR_EXCLUDED, /* its flow is shifted by a pipe */
	MR_SHAPE, /* a packet that a message cannot describe */
	MR_REROUTED, /* POST_ROUTING sent it elsewhere */
	MR_OVERFLOW, /* dropped: no room for long */
	MR_DENIED, /* dropped by the last rule or program */
	MR_LINK_DOWN, /* the link went down while it was sent */
	MR_RX, /* received */
	MR_RX_BORROWED, /* received with the sender's pages; counted in MR_RX, too */
	MR_RX_BAD, /* not an IP packet of that peer to us */
	MR_RX_MEMORY, /* no memory */
	MR_REASONS,
};

DECLARE_PER_CPU(u64[MR_REASONS], mr_net_counts);

static inline void mr_count(enum mr_reason reason)
{
	this_cpu_inc(mr_net_counts[reason]);
}

/* This guest in the member table; replaced as a whole. */
struct mr_self {
	struct rcu_head rcu;
	u32 id;
	u32 macs_len, addresses_len;
	u8 macs[MR_MAX_MACS][ETH_ALEN];
	struct net_device *devs[MR_MAX_MACS]; /* devices with these addresses; held */
	struct in6_addr addresses[MR_MAX_ADDRESSES];
};

/* Packets that wait for room in the ring. */
struct mr_backlog {
	spinlock_t lock; /* keeps the order of waiting and new packets */
	struct sk_buff_head skbs;
};

/* Another member. */
struct mr_node {
	struct rcu_head rcu;
	u32 id, index;
	u32 macs_len, addresses_len;
	u8 macs[MR_MAX_MACS][ETH_ALEN];
	struct in6_addr addresses[MR_MAX_ADDRESSES];
};

/* Path of a destination's packets. */
enum mr_path {
	MR_PATH_ORDINARY,
	MR_PATH_TO_CHANNEL, /* held until all earlier packets have arrived */
	MR_PATH_CHANNEL,
	MR_PATH_TO_ORDINARY, /* held until the peer has taken all messages */
};

/* Address of another member. */
struct mr_dest {
	struct hlist_node node;
	struct rcu_head rcu;
	struct in6_addr address; /* IPv4 as ::ffff:a.b.c.d */
	u32 id, index; /* member */
	enum mr_path path; /* changed under lock */
	spinlock_t lock; /* of path, held_skbs, bytes of eth */
	struct sk_buff_head held_skbs;
	int request_ifindex; /* device of a packet that asks for the channel; 0: none */
	bool needs_recheck; /* the neighbour changed */
	/* While not MR_PATH_ORDINARY: */
	struct mr_peer *peer;
	struct net_device *dev;
	struct neighbour *neigh;
	u8 eth[ETH_HLEN];
	unsigned int queue, queues; /* next queue to be marked; their number, 0: not begun */
	u32 token; /* of the expected marks */
	atomic_t marks; /* number of marks that have not arrived */
	unsigned long since_jiffies; /* time of the last change of path, or of the marks */
	unsigned long retry_jiffies;
	unsigned int failures;
};

/* net_table.c */
extern struct mutex mr_net_lock; /* of everything that changes destinations */
extern struct mr_self __rcu *mr_self;
extern struct mr_node __rcu *mr_nodes[MR_MAX_MEMBERS];
extern DECLARE_HASHTABLE(mr_dests, MR_NET_BITS);
void mr_dest_reset_retry(struct mr_dest *dest);
struct mr_dest *mr_dest_find(const struct in6_addr *address);
bool mr_is_own_address(const struct in6_addr *address);
bool mr_has_address(const struct in6_addr *addresses, u32 len, const struct in6_addr *address);
int mr_find_mac(const u8 macs[][ETH_ALEN], u32 len, const u8 *mac);
bool mr_is_excluded(const struct in6_addr *local, const struct in6_addr *remote, __be16 local_port,
		    __be16 remote_port);
void mr_table_changed(void);
void mr_table_devices_changed(struct net_device *leaving_dev);
void mr_table_clear(void);

/* net_move.c */
extern struct mr_peer *mr_net_peers[MR_MAX_MEMBERS]; /* under mr_net_lock; those that are up */
void mr_move_schedule_work(void);
void mr_move_peer_up(struct mr_peer *peer);
void mr_move_peer_down(struct mr_peer *peer);
void mr_move_recheck(void);
void mr_move_retire(struct mr_dest *dest);
int mr_move_init(void);
void mr_move_stop(void);
void mr_move_exit(void);

/* net_mark.c */
/* Form in which a mark comes. */
enum mr_mark_path {
	MR_MARK_FRAME,
	MR_MARK_MESSAGE,
	MR_MARK_PATHS,
};

bool mr_are_queues_empty(const struct net_device *dev);
void mr_renew_marks(struct mr_dest *dest);
bool mr_is_marked(const struct mr_dest *dest);
bool mr_are_marks_answered(const struct mr_dest *dest);
void mr_send_marks(struct mr_dest *dest);
void mr_send_channel_marks(struct mr_dest *dest);
void mr_mark_receive(enum mr_mark_path path, u32 index, u32 token);
void mr_mark_receive_answer(u32 index, u32 token, u16 count);
void mr_mark_init(void);
void mr_mark_exit(void);

/* net_hook.c */
int mr_hooks_register(void);
void mr_hooks_unregister(void);
void mr_send_ordinary(struct sk_buff *skb);

/* net_send.c */
int mr_send_skb(struct mr_dest *dest, struct sk_buff *skb);
void mr_send_skb_or_ordinary(struct mr_dest *dest, struct sk_buff *skb);
void mr_backlog_writable(struct mr_peer *peer, unsigned int queue);
bool mr_backlog_is_empty(const struct mr_dest *dest);
void mr_backlog_init(void);
void mr_backlog_flush(u32 index, const struct mr_dest *dest);
int mr_send_frame(struct mr_peer *peer, struct sk_buff *skb);
int mr_send_control(struct mr_peer *peer, unsigned int queue, u8 type, u32 token, u16 count);

/* Source and destination of an IP packet whose header is in linear memory. */
static inline void mr_addresses(const struct sk_buff *skb, struct in6_addr *source,
				struct in6_addr *destination)
{
	if (skb->protocol == htons(ETH_P_IP)) {
		ipv6_addr_set_v4mapped(ip_hdr(skb)->saddr, source);
		ipv6_addr_set_v4mapped(ip_hdr(skb)->daddr, destination);
	} else {
		*source = ipv6_hdr(skb)->saddr;
		*destination = ipv6_hdr(skb)->daddr;
	}
}

/* net_receive.c */
void mr_batch_deliver(struct list_head *batch);
void mr_batch_drop(struct list_head *batch);
struct sk_buff *mr_build_skb(struct mr_rx *rx, const struct net_device *dev);
bool mr_set_offloads(struct sk_buff *skb, const struct mr_net_meta *meta, u32 min_csum_start);
void mr_receive(struct mr_rx *rx);
void mr_received(unsigned int queue);
void mr_receive_init(void);
void mr_receive_exit(void);

/* net_headers.c */
struct mr_headers {
	u32 ip, transport; /* offsets from skb->data */
	__be16 version; /* ETH_P_IP, ETH_P_IPV6 */
	u8 protocol; /* IPPROTO_TCP, IPPROTO_UDP */
};

bool mr_pull_headers(struct sk_buff *skb, struct mr_headers *headers);
bool mr_is_for_socket(const struct sk_buff *skb, const struct mr_headers *headers);
int mr_keep_or_own_pages(struct sk_buff *skb, u32 ip, __be16 version);

/* net_device.c */
int mr_device_init(void);
void mr_device_exit(void);

/* net_debugfs.c */
const char *mr_reason_name(unsigned int reason);
u64 mr_count_sum(unsigned int reason);
void mr_net_debugfs_init(void);
void mr_net_debugfs_exit(void);

/* net_main.c */
extern const struct mr_client mr_net_client;

#endif
