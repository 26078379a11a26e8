// SPDX-License-Identifier: GPL-2.0
/*
 * Taking packets at LOCAL_OUT, behind every other hook there.
 *
 * Code below LOCAL_OUT that would see the packet sees it all the same: the hooks of POST_ROUTING
 * (rules, NAT, conntrack's confirmation) and the cgroup's egress programs are run here. Packets
 * that other code may handle (IPsec, tunnels, filters and shapers of the device) are not taken.
 *
 * Left out are: fragmentation (the channel has no MTU, so the peer gets whole what it would have
 * reassembled), the neighbour's output, the queueing discipline and the driver.
 */
#include <linux/bpf-cgroup.h>
#include <linux/netfilter.h>
#include <linux/netfilter_ipv4.h>
#include <linux/netfilter_ipv6.h>
#include <linux/module.h>
#include <linux/version.h>
#include <net/dst.h>
#include <net/ip.h>
#include <net/ip6_route.h>
#include <net/lwtunnel.h>
#include <net/pkt_sched.h>
#include <net/route.h>

#include "net.h"

/* Queueing disciplines that neither shape nor drop before their queue is full. */
static const char *const plain_qdiscs[] = { "noqueue", "pfifo_fast", "mq", "fq_codel", "fq",
					    "pfifo", "noop" };

struct mr_packet {
	struct mr_dest *dest;
	struct in6_addr source;
	u8 family;
	u8 protocol;
};

/* Marks a packet for which POST_ROUTING is over. */
static void mark_routed(struct sk_buff *skb)
{
	if (skb->protocol == htons(ETH_P_IP))
		IPCB(skb)->flags |= IPSKB_REROUTED;
	else
		IP6CB(skb)->flags |= IP6SKB_REROUTED;
}

/* Sends a packet that was taken or held the ordinary way: by the stack below POST_ROUTING. */
void mr_send_ordinary(struct sk_buff *skb)
{
	struct net *net;

	/* The route was removed while the packet waited. */
	if (!skb_dst(skb)) {
		kfree_skb(skb);
		return;
	}
	net = dev_net(skb_dst(skb)->dev);
	mark_routed(skb);
	dst_output(net, skb->sk, skb);
}

static int ordinary_okfn(struct net *net, struct sock *sk, struct sk_buff *skb)
{
	mark_routed(skb);
	return dst_output(net, sk, skb);
}

static bool is_plain_qdisc(const struct net_device *dev)
{
	const char *id = rcu_dereference(dev->qdisc)->ops->id;
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(plain_qdiscs); i++) {
		if (!strcmp(id, plain_qdiscs[i]))
			return true;
	}
	return false;
}

/* Whether the device has egress filters or taps, which must see outgoing packets. */
static bool has_egress(const struct net_device *dev)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 6, 0)
	if (rcu_access_pointer(dev->tcx_egress))
		return true;
#else
	if (rcu_access_pointer(dev->miniq_egress))
		return true;
#endif
#ifdef CONFIG_NETFILTER_EGRESS
	if (rcu_access_pointer(dev->nf_hooks_egress))
		return true;
#endif
	return !is_plain_qdisc(dev);
}

static bool is_direct_route(const struct sk_buff *skb, const struct mr_packet *packet)
{
	const struct dst_entry *dst = skb_dst(skb);

	/* Compared only: another CPU releases it when the ordinary way is taken again. */
	if (!dst || dst->dev != READ_ONCE(packet->dest->dev) || dst_xfrm(dst) || dst->lwtstate)
		return false;
	if (packet->family == AF_INET) {
		const struct rtable *rt = (const struct rtable *)dst;

		return rt->rt_type == RTN_UNICAST && !rt->rt_uses_gateway;
	}
	return ipv6_addr_equal(rt6_nexthop((const struct rt6_info *)dst, &packet->dest->address),
			       &packet->dest->address);
}

static bool is_flow_excluded(const struct sk_buff *skb, const struct mr_packet *packet)
{
	const __be16 *ports;
	__be16 buffer[2];

	if (packet->protocol != IPPROTO_TCP)
		return false;
	ports = skb_header_pointer(skb, skb_transport_offset(skb), sizeof(buffer), buffer);
	return ports && mr_is_excluded(&packet->source, &packet->dest->address, ports[0], ports[1]);
}

/* Checks whether a packet may be taken. MR_TAKEN, or the reason against it. */
static enum mr_reason check_packet(const struct sk_buff *skb, const struct mr_packet *packet)
{
	/* The fields of a tunnel's packet do not suffice to segment it again. */
	if (skb->encapsulation)
		return MR_PROTOCOL;
	if (!is_direct_route(skb, packet))
		return MR_ROUTE;
	if (!mr_is_own_address(&packet->source))
		return MR_SOURCE;
	if (has_egress(skb_dst(skb)->dev))
		return MR_EGRESS;
	if (is_flow_excluded(skb, packet))
		return MR_EXCLUDED;
	return MR_TAKEN;
}

/* Runs the hooks behind LOCAL_OUT. 1: goes on; 0: a hook has taken the packet. */
static int run_post_routing(struct sk_buff *skb, const struct nf_hook_state *state, u8 family)
{
	struct net_device *dev = skb_dst(skb)->dev;

	skb->dev = dev;
	skb->protocol = family == AF_INET ? htons(ETH_P_IP) : htons(ETH_P_IPV6);
	return nf_hook(family == AF_INET ? NFPROTO_IPV4 : NFPROTO_IPV6, NF_INET_POST_ROUTING,
		       state->net, state->sk, skb, NULL, dev, ordinary_okfn);
}

static bool has_same_addresses(const struct sk_buff *skb, const struct mr_packet *packet)
{
	struct in6_addr source, destination;

	mr_addresses(skb, &source, &destination);
	return ipv6_addr_equal(&destination, &packet->dest->address) && mr_is_own_address(&source);
}

/* Holds a packet while the path changes. False: it has changed meanwhile. */
static bool hold_packet(struct mr_dest *dest, struct sk_buff *skb, unsigned int *verdict)
{
	bool is_held = false;

	spin_lock_bh(&dest->lock);
	if (dest->path == MR_PATH_TO_CHANNEL || dest->path == MR_PATH_TO_ORDINARY) {
		is_held = true;
		if (skb_queue_len(&dest->held_skbs) < MR_NET_MAX_HELD) {
			skb_dst_force(skb);
			__skb_queue_tail(&dest->held_skbs, skb);
			*verdict = NF_STOLEN;
			mr_count(MR_HELD);
		} else {
			*verdict = NF_DROP_ERR(-ENOBUFS);
			mr_count(MR_OVERFLOW);
		}
	}
	spin_unlock_bh(&dest->lock);
	return is_held;
}

static unsigned int send_by_path(struct mr_dest *dest, struct sk_buff *skb)
{
	unsigned int verdict = NF_ACCEPT;
	enum mr_path path;
	int err;

	/* One read decides: between two, the path could change, and the packet overtake. */
	while ((path = READ_ONCE(dest->path)) != MR_PATH_CHANNEL) {
		if (path == MR_PATH_ORDINARY || hold_packet(dest, skb, &verdict))
			return verdict;
	}
	err = mr_send_skb(dest, skb);
	if (!err)
		return NF_STOLEN;
	if (err == -ENOBUFS) {
		mr_count(MR_OVERFLOW);
		return NF_DROP_ERR(-ENOBUFS);
	}
	mr_count(err == -ENOTCONN ? MR_LINK_DOWN : MR_SHAPE);
	return NF_ACCEPT;
}

static unsigned int take_packet(struct sk_buff *skb, const struct nf_hook_state *state,
				const struct mr_packet *packet)
{
	struct mr_dest *dest = packet->dest;
	struct sock *sk = state->sk;
	enum mr_reason reason;
	int err;

	if (READ_ONCE(dest->path) == MR_PATH_ORDINARY) {
		if (!READ_ONCE(dest->request_ifindex) &&
		    time_after_eq(jiffies, dest->retry_jiffies)) {
			WRITE_ONCE(dest->request_ifindex, state->out->ifindex);
			mr_move_schedule_work();
		}
		mr_count(MR_NOT_CONFIRMED);
		return NF_ACCEPT;
	}
	reason = check_packet(skb, packet);
	if (reason != MR_TAKEN) {
		mr_count(reason);
		return NF_ACCEPT;
	}
	err = run_post_routing(skb, state, packet->family);
	if (err != 1) {
		if (err < 0)
			mr_count(MR_DENIED);
		return NF_STOLEN;
	}
	mark_routed(skb);
	if (!has_same_addresses(skb, packet) || !is_direct_route(skb, packet)) {
		mr_count(MR_REROUTED);
		return NF_ACCEPT;
	}
	err = BPF_CGROUP_RUN_PROG_INET_EGRESS(sk, skb);
	if (err && err != NET_XMIT_CN) {
		mr_count(MR_DENIED);
		return NF_DROP;
	}
	return send_by_path(dest, skb);
}

static unsigned int hook_v4(void *priv, struct sk_buff *skb, const struct nf_hook_state *state)
{
	const struct iphdr *ip = ip_hdr(skb);
	struct mr_packet packet = { .family = AF_INET };
	struct in6_addr destination;

	ipv6_addr_set_v4mapped(ip->daddr, &destination);
	packet.dest = mr_dest_find(&destination);
	if (!packet.dest)
		return NF_ACCEPT;
	packet.protocol = ip->protocol;
	if ((packet.protocol != IPPROTO_TCP && packet.protocol != IPPROTO_UDP) || ip->ihl != 5 ||
	    ip_is_fragment(ip)) {
		mr_count(MR_PROTOCOL);
		return NF_ACCEPT;
	}
	ipv6_addr_set_v4mapped(ip->saddr, &packet.source);
	return take_packet(skb, state, &packet);
}

static unsigned int hook_v6(void *priv, struct sk_buff *skb, const struct nf_hook_state *state)
{
	const struct ipv6hdr *ip = ipv6_hdr(skb);
	struct mr_packet packet = { .family = AF_INET6 };

	packet.dest = mr_dest_find(&ip->daddr);
	if (!packet.dest)
		return NF_ACCEPT;
	packet.protocol = ip->nexthdr;
	/* A jumbogram has payload_len 0. */
	if ((packet.protocol != IPPROTO_TCP && packet.protocol != IPPROTO_UDP) ||
	    !ip->payload_len) {
		mr_count(MR_PROTOCOL);
		return NF_ACCEPT;
	}
	packet.source = ip->saddr;
	return take_packet(skb, state, &packet);
}

static const struct nf_hook_ops hooks[] = {
	{
		.hook = hook_v4,
		.pf = NFPROTO_IPV4,
		.hooknum = NF_INET_LOCAL_OUT,
		.priority = NF_IP_PRI_LAST,
	},
	{
		.hook = hook_v6,
		.pf = NFPROTO_IPV6,
		.hooknum = NF_INET_LOCAL_OUT,
		.priority = NF_IP6_PRI_LAST,
	},
};

int mr_hooks_register(void)
{
	return nf_register_net_hooks(&init_net, hooks, ARRAY_SIZE(hooks));
}

void mr_hooks_unregister(void)
{
	nf_unregister_net_hooks(&init_net, hooks, ARRAY_SIZE(hooks));
}
