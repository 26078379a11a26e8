// SPDX-License-Identifier: GPL-2.0
/*
 * Keeps pages of peers away from devices.
 *
 * A packet may carry pages that lie in the memory of its sender. What reads a socket may have them
 * as long as it likes; but splice() puts them into another socket, and a router or a bridge sends
 * the packet on. A device's back end outside of this guest may not know the bus that the pages
 * are behind: QEMU does not show it to vhost-user back ends, whose queue then stops.
 *
 * So packets that leave by IP have such pages copied behind POST_ROUTING; who receives for a device
 * whose packets may go on below IP, such as a bridge's, copies at once.
 *
 * Limits: the initial network namespace. A program that splices from a socket to a file with
 * O_DIRECT hands the pages to the disk.
 */
#include <linux/netfilter.h>
#include <linux/netfilter_ipv4.h>
#include <linux/netfilter_ipv6.h>
#include <linux/skbuff.h>

#include "channel.h"

static bool has_peer_pages(const struct sk_buff *skb)
{
	unsigned int i;

	for (i = 0; i < skb_shinfo(skb)->nr_frags; i++) {
		if (mr_is_peer_page(skb_frag_page(&skb_shinfo(skb)->frags[i])))
			return true;
	}
	return false;
}

/* Puts own pages in their place. Not 0: no memory. */
static int own_pages(struct sk_buff *skb)
{
	struct sk_buff *part;
	int err = 0;

	if (has_peer_pages(skb))
		err = skb_copy_ubufs(skb, GFP_ATOMIC);
	skb_walk_frags(skb, part) {
		if (!err && has_peer_pages(part))
			err = skb_copy_ubufs(part, GFP_ATOMIC);
	}
	return err;
}

static unsigned int hook(void *priv, struct sk_buff *skb, const struct nf_hook_state *state)
{
	if (!skb_is_nonlinear(skb) || !mr_peer_pages_in_use() || !own_pages(skb))
		return NF_ACCEPT;
	return NF_DROP_ERR(-ENOMEM);
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

int mr_pages_register(void)
{
	return nf_register_net_hooks(&init_net, hooks, ARRAY_SIZE(hooks));
}

void mr_pages_unregister(void)
{
	nf_unregister_net_hooks(&init_net, hooks, ARRAY_SIZE(hooks));
}
