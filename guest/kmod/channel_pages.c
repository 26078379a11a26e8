// SPDX-License-Identifier: GPL-2.0
/*
 * Keeps pages of peers away from devices.
 *
 * A packet may carry pages that lie in the memory of its sender. A program that reads a socket
 * may keep them as long as it likes; but splice() puts them into another socket, and a router or a
 * bridge sends the packet on. A device's back end outside of this guest may not see the bus that
 * the pages are behind: QEMU does not show it to vhost-user back ends, whose queue then stops.
 *
 * So packets that leave by IP have such pages copied behind POST_ROUTING, in all namespaces. Those
 * that may be forwarded below IP, by a bridge or out of a tunnel, are copied on receipt.
 *
 * Limits: a program that splices from a socket to a file with O_DIRECT hands the pages to the
 * disk. Packets that wait for a CPU while their device is put into a bridge are lost.
 */
#include <linux/netfilter.h>
#include <linux/netfilter_ipv4.h>
#include <linux/netfilter_ipv6.h>
#include <linux/module.h>
#include <linux/skbuff.h>
#include <net/net_namespace.h>

#include "channel.h"

static bool has_peer_pages(const struct sk_buff *skb)
{
	unsigned int i;

	for (i = 0; i < skb_shinfo(skb)->nr_frags; i++) {
		const struct page *page = skb_frag_page(&skb_shinfo(skb)->frags[i]);

		if (page && mr_is_peer_page(page))
			return true;
	}
	return false;
}

/* Whether the fragment list has pages of peers, or must be copied anyway: it has lists itself. */
static bool has_parts_with_peer_pages(const struct sk_buff *skb)
{
	const struct sk_buff *part;

	skb_walk_frags(skb, part) {
		if (has_peer_pages(part) || skb_has_frag_list(part))
			return true;
	}
	return false;
}

int mr_own_pages(struct sk_buff *skb)
{
	if (!skb_is_nonlinear(skb) || !mr_peer_pages_are_in_use())
		return 0;
	/* Parts may be shared with a clone, so they are not changed. */
	if (has_parts_with_peer_pages(skb))
		return skb_linearize(skb);
	return has_peer_pages(skb) ? skb_copy_ubufs(skb, GFP_ATOMIC) : 0;
}
EXPORT_SYMBOL_GPL(mr_own_pages);

static unsigned int hook(void *priv, struct sk_buff *skb, const struct nf_hook_state *state)
{
	return mr_own_pages(skb) ? NF_DROP_ERR(-ENOMEM) : NF_ACCEPT;
}

static const struct nf_hook_ops hooks[] = {
	{
		.hook = hook,
		.pf = NFPROTO_IPV4,
		.hooknum = NF_INET_POST_ROUTING,
		.priority = NF_IP_PRI_LAST,
	},
	{
		.hook = hook,
		.pf = NFPROTO_IPV6,
		.hooknum = NF_INET_POST_ROUTING,
		.priority = NF_IP6_PRI_LAST,
	},
};

static int __net_init net_begin(struct net *net)
{
	return nf_register_net_hooks(net, hooks, ARRAY_SIZE(hooks));
}

static void __net_exit net_end(struct net *net)
{
	nf_unregister_net_hooks(net, hooks, ARRAY_SIZE(hooks));
}

static struct pernet_operations all_nets = { .init = net_begin, .exit = net_end };

int mr_pages_register(void)
{
	return register_pernet_subsys(&all_nets);
}

void mr_pages_unregister(void)
{
	unregister_pernet_subsys(&all_nets);
}
