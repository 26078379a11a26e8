// SPDX-License-Identifier: GPL-2.0
/*
 * A network device on the channel (parameter device): all members of the trust domain are on one
 * Ethernet segment, whose frames never leave the host. For appliances that route or bridge between
 * their guests; packets may have 64 KiB, and no checksum is computed inside the host.
 *
 * Each peer has a transmit queue of its own, so one that is slow stops its own queue alone.
 * Addresses behind a peer (of a bridge there) are learned from its frames, as any switch does;
 * the members' own addresses contain their number and are learned from nobody.
 */
#include <linux/ethtool.h>
#include <linux/etherdevice.h>
#include <linux/ip.h>
#include <linux/jhash.h>
#include <linux/module.h>
#include <linux/netdevice.h>
#include <linux/rtnetlink.h>
#include <net/busy_poll.h>

#include "net.h"

#define FDB_LEN 1024 /* addresses that are remembered, one for each hash */
#define FDB_AGE (300 * HZ)
#define DEFAULT_MTU 65520
#define FLOOD MR_MAX_MEMBERS /* transmit queue of frames to all */

static bool device;
module_param(device, bool, 0444);
MODULE_PARM_DESC(device, "make a network device on the channel (N)");

/* Entry of the forwarding database: an address and the peer that sent from it. */
struct fdb_entry {
	u64 mac_index; /* 48 bits of address, below them the index; read and written as one word */
	unsigned long seen_jiffies;
};

static struct net_device *mr_dev;
static struct fdb_entry fdb[FDB_LEN];
static struct mr_peer __rcu *peers[MR_MAX_MEMBERS];
static struct list_head batches[MR_MAX_QUEUES];

static const u8 member_prefix[4] = { 0x06, 0x4d, 0x52, 0x00 };

static u64 mac_key(const u8 *mac)
{
	return ether_addr_to_u64(mac) << 16;
}

static struct fdb_entry *fdb_at(const u8 *mac)
{
	return &fdb[jhash(mac, ETH_ALEN, 0) % FDB_LEN];
}

static void fdb_learn(const u8 *mac, u32 index)
{
	struct fdb_entry *entry = fdb_at(mac);
	u64 value = mac_key(mac) | index;

	if (is_multicast_ether_addr(mac))
		return;
	if (READ_ONCE(entry->mac_index) != value)
		WRITE_ONCE(entry->mac_index, value);
	WRITE_ONCE(entry->seen_jiffies, jiffies);
}

/* Peer behind which an address is; FLOOD: unknown, or a group. Caller is in an RCU read section. */
static u32 find_peer(const u8 *mac)
{
	const struct fdb_entry *entry = fdb_at(mac);
	u64 value = READ_ONCE(entry->mac_index);
	u32 i;

	if (is_multicast_ether_addr(mac))
		return FLOOD;
	if (!memcmp(mac, member_prefix, sizeof(member_prefix))) {
		for (i = 0; i < MR_MAX_MEMBERS; i++) {
			const struct mr_node *node = rcu_dereference(mr_nodes[i]);

			if (node && node->id == get_unaligned_be16(mac + 4))
				return i;
		}
	}
	if ((value & ~0xffffull) == mac_key(mac) &&
	    time_before(jiffies, READ_ONCE(entry->seen_jiffies) + FDB_AGE))
		return value & 0xffff;
	return FLOOD;
}

static u16 device_select_queue(struct net_device *dev, struct sk_buff *skb,
			       struct net_device *sb_dev)
{
	u32 index;

	rcu_read_lock();
	index = find_peer(skb->data);
	rcu_read_unlock();
	return index;
}

/* Sends a packet, which stays the caller's. 0: sent. */
static int send_to(u32 index, struct sk_buff *skb)
{
	struct mr_peer *peer = rcu_dereference(peers[index]);

	return peer ? mr_send_frame(peer, skb) : -ENOTCONN;
}

static void flood(struct sk_buff *skb)
{
	u32 i;

	for (i = 0; i < MR_MAX_MEMBERS; i++)
		send_to(i, skb);
}

static netdev_tx_t device_xmit(struct sk_buff *skb, struct net_device *dev)
{
	u32 index = skb_get_queue_mapping(skb), len = skb->len;
	int err = 0;

	rcu_read_lock();
	if (index >= MR_MAX_MEMBERS) {
		flood(skb);
	} else {
		/* Stopped first: room that comes meanwhile starts the queue again. */
		err = send_to(index, skb);
		if (err == -ENOSPC) {
			netif_stop_subqueue(dev, index);
			err = send_to(index, skb);
			if (err != -ENOSPC)
				netif_start_subqueue(dev, index);
		}
	}
	rcu_read_unlock();
	if (err == -ENOSPC)
		return NETDEV_TX_BUSY;
	if (err)
		dev_core_stats_tx_dropped_inc(dev);
	else
		dev_sw_netstats_tx_add(dev, 1, len);
	dev_kfree_skb_any(skb);
	return NETDEV_TX_OK;
}

static void device_writable(struct mr_peer *peer, unsigned int queue)
{
	netif_wake_subqueue(mr_dev, mr_peer_index(peer));
}

static void device_receive(struct mr_rx *rx)
{
	u32 index = mr_peer_index(mr_rx_peer(rx));
	const struct mr_net_meta *meta = mr_rx_meta(rx);
	struct sk_buff *skb;

	if (!netif_running(mr_dev) || mr_rx_len(rx) < ETH_HLEN)
		return;
	skb = mr_build_skb(rx, mr_dev);
	if (skb)
		skb->dev = mr_dev;
	if (!skb || !pskb_may_pull(skb, ETH_HLEN) ||
	    !mr_set_offloads(skb, meta, ETH_HLEN + sizeof(struct iphdr)) ||
	    mr_keep_or_own_pages(skb, ETH_HLEN, ((struct ethhdr *)skb->data)->h_proto)) {
		dev_core_stats_rx_dropped_inc(mr_dev);
		kfree_skb(skb);
		return;
	}
	if (memcmp(skb->data + ETH_ALEN, member_prefix, sizeof(member_prefix)))
		fdb_learn(skb->data + ETH_ALEN, index);
	dev_sw_netstats_rx_add(mr_dev, skb->len);
	skb->protocol = eth_type_trans(skb, mr_dev);
	if (meta->hash)
		skb_set_hash(skb, le32_to_cpu(meta->hash), PKT_HASH_TYPE_L4);
	skb_record_rx_queue(skb, mr_rx_queue(rx));
	skb_mark_napi_id(skb, mr_rx_napi(rx));
	list_add_tail(&skb->list, &batches[mr_rx_queue(rx)]);
}

static void device_received(unsigned int queue)
{
	mr_batch_deliver(&batches[queue]);
}

static void carrier_update(void)
{
	bool has_peer = false;
	u32 i;

	for (i = 0; i < MR_MAX_MEMBERS; i++)
		has_peer |= !!rcu_access_pointer(peers[i]);
	if (has_peer)
		netif_carrier_on(mr_dev);
	else
		netif_carrier_off(mr_dev);
}

/* Caller holds the channel's lock. */
static void device_peer_up(struct mr_peer *peer)
{
	u32 index = mr_peer_index(peer);

	mr_peer_get(peer);
	rcu_assign_pointer(peers[index], peer);
	netif_wake_subqueue(mr_dev, index);
	carrier_update();
}

/* Caller holds the channel's lock. */
static void device_peer_down(struct mr_peer *peer)
{
	u32 index = mr_peer_index(peer);

	if (rcu_access_pointer(peers[index]) != peer)
		return;
	RCU_INIT_POINTER(peers[index], NULL);
	synchronize_net();
	/* The next attempt drops packets that wait for room. */
	netif_wake_subqueue(mr_dev, index);
	mr_peer_put(peer);
	carrier_update();
}

/* Sets the device's address, which contains this member's id, once the id is known. */
static void device_table_changed(void)
{
	u8 mac[ETH_ALEN];
	u32 id = 0;

	rcu_read_lock();
	if (rcu_dereference(mr_self))
		id = rcu_dereference(mr_self)->id;
	rcu_read_unlock();
	if (!id)
		return;
	memcpy(mac, member_prefix, sizeof(member_prefix));
	put_unaligned_be16(id, mac + 4);
	rtnl_lock();
	if (!ether_addr_equal(mr_dev->dev_addr, mac)) {
		eth_hw_addr_set(mr_dev, mac);
		call_netdevice_notifiers(NETDEV_CHANGEADDR, mr_dev);
	}
	rtnl_unlock();
}

static const struct mr_client device_client = {
	.id = MR_CLIENT_DEVICE,
	.name = "device",
	.owner = THIS_MODULE,
	.peer_up = device_peer_up,
	.peer_down = device_peer_down,
	.receive = device_receive,
	.received = device_received,
	.writable = device_writable,
	.table_changed = device_table_changed,
};

static int device_open(struct net_device *dev)
{
	netif_tx_start_all_queues(dev);
	return 0;
}

static int device_stop(struct net_device *dev)
{
	netif_tx_stop_all_queues(dev);
	return 0;
}

static int device_init(struct net_device *dev)
{
	dev->tstats = netdev_alloc_pcpu_stats(struct pcpu_sw_netstats);
	return dev->tstats ? 0 : -ENOMEM;
}

static void device_uninit(struct net_device *dev)
{
	free_percpu(dev->tstats);
}

static const struct net_device_ops device_ops = {
	.ndo_init = device_init,
	.ndo_uninit = device_uninit,
	.ndo_open = device_open,
	.ndo_stop = device_stop,
	.ndo_start_xmit = device_xmit,
	.ndo_select_queue = device_select_queue,
	.ndo_get_stats64 = dev_get_tstats64,
	.ndo_validate_addr = eth_validate_addr,
};

static void get_drvinfo(struct net_device *dev, struct ethtool_drvinfo *info)
{
	strscpy(info->driver, "millrace_net", sizeof(info->driver));
	strscpy(info->bus_info, "channel", sizeof(info->bus_info));
}

static int get_sset_count(struct net_device *dev, int set)
{
	return set == ETH_SS_STATS ? MR_REASONS : -EOPNOTSUPP;
}

static void get_strings(struct net_device *dev, u32 set, u8 *data)
{
	unsigned int i;

	for (i = 0; set == ETH_SS_STATS && i < MR_REASONS; i++)
		strscpy(data + i * ETH_GSTRING_LEN, mr_reason_name(i), ETH_GSTRING_LEN);
}

static void get_ethtool_stats(struct net_device *dev, struct ethtool_stats *stats, u64 *data)
{
	unsigned int i;

	for (i = 0; i < MR_REASONS; i++)
		data[i] = mr_count_sum(i);
}

static const struct ethtool_ops device_ethtool_ops = {
	.get_drvinfo = get_drvinfo,
	.get_link = ethtool_op_get_link,
	.get_sset_count = get_sset_count,
	.get_strings = get_strings,
	.get_ethtool_stats = get_ethtool_stats,
};

static void device_setup(struct net_device *dev)
{
	dev->netdev_ops = &device_ops;
	dev->ethtool_ops = &device_ethtool_ops;
	dev->min_mtu = ETH_MIN_MTU;
	dev->max_mtu = DEFAULT_MTU;
	dev->mtu = DEFAULT_MTU;
	dev->hw_features = NETIF_F_SG | NETIF_F_HW_CSUM | NETIF_F_TSO | NETIF_F_TSO6 |
			   NETIF_F_FRAGLIST | NETIF_F_HIGHDMA | NETIF_F_RXCSUM;
	dev->features = dev->hw_features;
	dev->vlan_features = dev->hw_features;
	eth_hw_addr_random(dev);
	netif_carrier_off(dev);
}

/* Makes the device if the parameter `device` asks for it. */
int mr_device_init(void)
{
	unsigned int i;
	int err;

	if (!device)
		return 0;
	for (i = 0; i < MR_MAX_QUEUES; i++)
		INIT_LIST_HEAD(&batches[i]);
	mr_dev = alloc_netdev_mqs(0, "mr%d", NET_NAME_ENUM, ether_setup, MR_MAX_MEMBERS + 1,
				  MR_MAX_QUEUES);
	if (!mr_dev)
		return -ENOMEM;
	device_setup(mr_dev);
	err = register_netdev(mr_dev);
	if (err)
		goto free;
	err = mr_client_register(&device_client);
	if (!err)
		return 0;
	unregister_netdev(mr_dev);
free:
	free_netdev(mr_dev);
	mr_dev = NULL;
	return err;
}

void mr_device_exit(void)
{
	unsigned int i;

	if (!mr_dev)
		return;
	/* First: calls of the client change the carrier. Then senders; no reader holds a peer. */
	mr_client_unregister(&device_client);
	unregister_netdev(mr_dev);
	for (i = 0; i < MR_MAX_MEMBERS; i++) {
		struct mr_peer *peer = rcu_dereference_protected(peers[i], true);

		if (peer)
			mr_peer_put(peer);
	}
	for (i = 0; i < MR_MAX_QUEUES; i++)
		mr_batch_drop(&batches[i]);
	free_netdev(mr_dev);
}
