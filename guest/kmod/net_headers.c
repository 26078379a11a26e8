// SPDX-License-Identifier: GPL-2.0
/*
 * Headers of packets that lie in the memory of a peer, which may change them at any time.
 *
 * Rules, conntrack and sockets have to see the same headers, so all of them are brought into own
 * memory first. The data may stay where it is if nobody but a socket reads it; a tunnel would
 * send it on, and IPsec would write to it.
 */
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <net/ip.h>
#include <net/udp.h>

#include "net.h"

static bool pull_ip(struct sk_buff *skb, struct mr_headers *headers)
{
	const struct iphdr *v4;
	const struct ipv6hdr *v6;

	if (headers->version == htons(ETH_P_IP)) {
		headers->transport = headers->ip + sizeof(*v4);
		if (!pskb_may_pull(skb, headers->transport))
			return false;
		v4 = (const struct iphdr *)(skb->data + headers->ip);
		headers->protocol = v4->protocol;
		return v4->version == 4 && v4->ihl == 5 && !ip_is_fragment(v4);
	}
	headers->transport = headers->ip + sizeof(*v6);
	if (headers->version != htons(ETH_P_IPV6) || !pskb_may_pull(skb, headers->transport))
		return false;
	v6 = (const struct ipv6hdr *)(skb->data + headers->ip);
	headers->protocol = v6->nexthdr;
	return v6->version == 6;
}

/*
 * Pulls all headers of a packet of TCP or UDP without options, extension headers and fragments, as
 * the hooks take them. @headers: ip and version are set. False: it is another packet.
 */
bool mr_pull_headers(struct sk_buff *skb, struct mr_headers *headers)
{
	const struct tcphdr *tcp;

	if (!pull_ip(skb, headers))
		return false;
	if (headers->protocol == IPPROTO_UDP)
		return pskb_may_pull(skb, headers->transport + sizeof(struct udphdr));
	if (headers->protocol != IPPROTO_TCP ||
	    !pskb_may_pull(skb, headers->transport + sizeof(*tcp)))
		return false;
	tcp = (const struct tcphdr *)(skb->data + headers->transport);
	return tcp->doff >= 5 && pskb_may_pull(skb, headers->transport + tcp->doff * 4);
}

static bool is_plain(struct sock *sk)
{
	bool plain = sk && !udp_sk(sk)->encap_type;

	if (sk)
		sock_put(sk);
	return plain;
}

/* Whether only a socket reads the data in the kernel. Caller is in an RCU read section. */
bool mr_is_for_socket(const struct sk_buff *skb, const struct mr_headers *headers)
{
	const struct udphdr *udp = (const struct udphdr *)(skb->data + headers->transport);
	const void *ip = skb->data + headers->ip;
	const struct iphdr *v4 = ip;
	const struct ipv6hdr *v6 = ip;
	struct net *net = dev_net(skb->dev);
	int ifindex = skb->dev->ifindex;

	if (headers->protocol == IPPROTO_TCP || !skb_is_nonlinear(skb))
		return true;
	if (headers->version == htons(ETH_P_IP))
		return is_plain(udp4_lib_lookup(net, v4->saddr, udp->source, v4->daddr, udp->dest,
						ifindex));
	return is_plain(udp6_lib_lookup(net, &v6->saddr, udp->source, &v6->daddr, udp->dest,
					ifindex));
}

/* Replaces peers' pages in a frame unless only a socket reads them. Not 0: no memory. */
int mr_keep_or_own_pages(struct sk_buff *skb, u32 ip, __be16 version)
{
	struct mr_headers headers = { .ip = ip, .version = version };

	if (!skb_is_nonlinear(skb))
		return 0;
	if (mr_pull_headers(skb, &headers) && mr_is_for_socket(skb, &headers))
		return 0;
	return mr_own_pages(skb);
}
