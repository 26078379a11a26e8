// SPDX-License-Identifier: GPL-2.0
/*
 * Addresses: ours and those of other members, as the host's member table has them.
 */
#include <linux/jhash.h>
#include <linux/rculist.h>
#include <linux/rtnetlink.h>
#include <linux/slab.h>

#include "net.h"

DEFINE_MUTEX(mr_net_lock); /* inside rtnl and the channel's lock */
struct mr_self __rcu *mr_self;
struct mr_node __rcu *mr_nodes[MR_MAX_MEMBERS];
DEFINE_HASHTABLE(mr_dests, MR_NET_BITS);

/* Flows that take the ordinary way; replaced as a whole. NULL: none. */
struct mr_exclude_list {
	struct rcu_head rcu;
	u32 len;
	struct mr_exclude flows[];
};

static struct mr_exclude_list __rcu *exclude_list;

static u32 hash_address(const struct in6_addr *address)
{
	return jhash2((__force const u32 *)address->s6_addr32, 4, 0) % HASH_SIZE(mr_dests);
}

/* Caller is in an RCU read section. */
struct mr_dest *mr_dest_find(const struct in6_addr *address)
{
	struct mr_dest *dest;

	hlist_for_each_entry_rcu(dest, &mr_dests[hash_address(address)], node,
				 lockdep_is_held(&mr_net_lock)) {
		if (ipv6_addr_equal(&dest->address, address))
			return dest;
	}
	return NULL;
}

bool mr_has_address(const struct in6_addr *addresses, u32 len, const struct in6_addr *address)
{
	u32 i;

	for (i = 0; i < len; i++) {
		if (ipv6_addr_equal(&addresses[i], address))
			return true;
	}
	return false;
}

int mr_find_mac(const u8 macs[][ETH_ALEN], u32 len, const u8 *mac)
{
	u32 i;

	for (i = 0; i < len; i++) {
		if (!memcmp(macs[i], mac, ETH_ALEN))
			return i;
	}
	return -1;
}

/* Caller is in an RCU read section. */
bool mr_is_own_address(const struct in6_addr *address)
{
	const struct mr_self *self = rcu_dereference(mr_self);

	return self && mr_has_address(self->addresses, self->addresses_len, address);
}

/* Caller is in an RCU read section. */
bool mr_is_excluded(const struct in6_addr *local, const struct in6_addr *remote, __be16 local_port,
		    __be16 remote_port)
{
	const struct mr_exclude_list *list = rcu_dereference(exclude_list);
	u32 i;

	for (i = 0; list && i < list->len; i++) {
		const struct mr_exclude *flow = &list->flows[i];

		if (le16_to_cpu(flow->local_port) == ntohs(local_port) &&
		    le16_to_cpu(flow->remote_port) == ntohs(remote_port) &&
		    !memcmp(flow->local, local, sizeof(*local)) &&
		    !memcmp(flow->remote, remote, sizeof(*remote)))
			return true;
	}
	return false;
}

/* Finds the device that has the address and is not below a bridge or bond. Held. */
static struct net_device *find_device_by_mac(const u8 *mac, const struct net_device *leaving_dev)
{
	struct net_device *dev, *found = NULL;

	ASSERT_RTNL();
	for_each_netdev(&init_net, dev) {
		if (dev != leaving_dev && dev->addr_len == ETH_ALEN && netif_running(dev) &&
		    ether_addr_equal(dev->dev_addr, mac) && !netdev_master_upper_dev_get(dev)) {
			found = dev;
			break;
		}
	}
	if (found)
		dev_hold(found);
	return found;
}

static void self_replace(struct mr_self *next)
{
	struct mr_self *old = rcu_replace_pointer(mr_self, next, lockdep_is_held(&mr_net_lock));
	u32 i;

	if (!old)
		return;
	synchronize_net();
	for (i = 0; i < old->macs_len; i++) {
		if (old->devs[i])
			dev_put(old->devs[i]);
	}
	kfree(old);
}

static bool is_same_self(const struct mr_self *self, const struct mr_member_info *info)
{
	if (!self || !info)
		return !self && !info;
	return self->id == info->id && self->macs_len == info->macs_len &&
	       self->addresses_len == info->addresses_len &&
	       !memcmp(self->macs, info->macs, info->macs_len * ETH_ALEN) &&
	       !memcmp(self->addresses, info->addresses,
		       info->addresses_len * sizeof(info->addresses[0]));
}

static void set_self(const struct mr_member_info *info)
{
	struct mr_self *self;
	u32 i;

	if (is_same_self(rcu_dereference_protected(mr_self, lockdep_is_held(&mr_net_lock)), info))
		return;
	self = info ? kzalloc(sizeof(*self), GFP_KERNEL) : NULL;
	if (self) {
		self->id = info->id;
		self->macs_len = info->macs_len;
		self->addresses_len = info->addresses_len;
		memcpy(self->macs, info->macs, sizeof(self->macs));
		memcpy(self->addresses, info->addresses, sizeof(self->addresses));
		for (i = 0; i < self->macs_len; i++)
			self->devs[i] = find_device_by_mac(self->macs[i], NULL);
	}
	self_replace(self);
}

/*
 * Looks up the devices with our addresses again: some came, went or changed their address. Caller
 * holds rtnl. @leaving_dev is no longer used.
 */
void mr_table_devices_changed(struct net_device *leaving_dev)
{
	struct mr_self *old, *self;
	u32 i;

	mutex_lock(&mr_net_lock);
	old = rcu_dereference_protected(mr_self, lockdep_is_held(&mr_net_lock));
	self = old ? kmemdup(old, sizeof(*old), GFP_KERNEL) : NULL;
	for (i = 0; self && i < self->macs_len; i++)
		self->devs[i] = find_device_by_mac(self->macs[i], leaving_dev);
	self_replace(self);
	mutex_unlock(&mr_net_lock);
}

static bool is_same_node(const struct mr_node *node, const struct mr_member_info *info)
{
	return node && node->id == info->id && node->macs_len == info->macs_len &&
	       node->addresses_len == info->addresses_len &&
	       !memcmp(node->macs, info->macs, sizeof(node->macs)) &&
	       !memcmp(node->addresses, info->addresses,
		       info->addresses_len * sizeof(info->addresses[0]));
}

/* Lets a failed destination be tried again after a change. */
void mr_dest_reset_retry(struct mr_dest *dest)
{
	dest->failures = 0;
	dest->retry_jiffies = jiffies;
}

static void dest_add(const struct mr_node *node, const struct in6_addr *address)
{
	struct mr_dest *dest = mr_dest_find(address);

	/* An address of two members is the first one's: the host does not give it to two. */
	if (dest)
		return;
	dest = kzalloc(sizeof(*dest), GFP_KERNEL);
	if (!dest)
		return;
	dest->address = *address;
	dest->id = node->id;
	dest->index = node->index;
	mr_dest_reset_retry(dest);
	spin_lock_init(&dest->lock);
	__skb_queue_head_init(&dest->held_skbs);
	hlist_add_head_rcu(&dest->node, &mr_dests[hash_address(address)]);
}

static void dest_remove(struct mr_dest *dest)
{
	hlist_del_rcu(&dest->node);
	synchronize_net();
	mr_move_retire(dest);
	kfree_rcu(dest, rcu);
}

/* Removes the destinations that the table no longer gives to a member. */
static void dests_prune(u32 index, const struct mr_node *node)
{
	struct hlist_node *next;
	struct mr_dest *dest;
	unsigned int i;

	hash_for_each_safe(mr_dests, i, next, dest, node) {
		if (dest->index != index)
			continue;
		dest->needs_recheck = true;
		mr_dest_reset_retry(dest);
		if (!node || dest->id != node->id ||
		    !mr_has_address(node->addresses, node->addresses_len, &dest->address))
			dest_remove(dest);
	}
}

static void set_node(u32 index, const struct mr_member_info *info)
{
	struct mr_node *old = rcu_dereference_protected(mr_nodes[index],
							lockdep_is_held(&mr_net_lock));
	struct mr_node *node = NULL;
	u32 i;

	if (info ? is_same_node(old, info) : !old)
		return;
	if (info)
		node = kzalloc(sizeof(*node), GFP_KERNEL);
	if (node) {
		node->id = info->id;
		node->index = index;
		node->macs_len = info->macs_len;
		node->addresses_len = info->addresses_len;
		memcpy(node->macs, info->macs, sizeof(node->macs));
		memcpy(node->addresses, info->addresses, sizeof(node->addresses));
	}
	rcu_assign_pointer(mr_nodes[index], node);
	if (old)
		kfree_rcu(old, rcu);
	dests_prune(index, node);
	for (i = 0; node && i < node->addresses_len; i++)
		dest_add(node, &node->addresses[i]);
}

static void set_excludes(void)
{
	static u32 last_seq;
	struct mr_exclude_list *list, *old;
	u32 seq;

	old = rcu_dereference_protected(exclude_list, lockdep_is_held(&mr_net_lock));
	list = kzalloc(struct_size(list, flows, MR_MAX_EXCLUDES), GFP_KERNEL);
	if (!list)
		return;
	list->len = mr_excludes(list->flows, &seq);
	if (old && seq == last_seq) {
		kfree(list);
		return;
	}
	last_seq = seq;
	old = rcu_replace_pointer(exclude_list, list, lockdep_is_held(&mr_net_lock));
	/* Senders no longer see the old list; their packets may still be in a ring. */
	synchronize_net();
	kfree(old);
	mr_excludes_hold(seq);
}

/* Takes over the member table. Caller holds the channel's lock. */
void mr_table_changed(void)
{
	struct mr_member_info *members = kcalloc(MR_MAX_MEMBERS, sizeof(*members), GFP_KERNEL);
	const struct mr_member_info *others[MR_MAX_MEMBERS] = {}, *self = NULL;
	unsigned int i, count;

	if (!members)
		return;
	rtnl_lock();
	mutex_lock(&mr_net_lock);
	count = mr_members(members);
	for (i = 0; i < count; i++) {
		if (members[i].self)
			self = &members[i];
		else
			others[members[i].index] = &members[i];
	}
	set_self(self);
	for (i = 0; i < MR_MAX_MEMBERS; i++)
		set_node(i, others[i]);
	set_excludes();
	mutex_unlock(&mr_net_lock);
	rtnl_unlock();
	kfree(members);
	mr_move_schedule_work();
}

void mr_table_clear(void)
{
	struct mr_exclude_list *list;
	unsigned int i;

	mutex_lock(&mr_net_lock);
	for (i = 0; i < MR_MAX_MEMBERS; i++)
		set_node(i, NULL);
	self_replace(NULL);
	list = rcu_replace_pointer(exclude_list, NULL, lockdep_is_held(&mr_net_lock));
	synchronize_net();
	kfree(list);
	mutex_unlock(&mr_net_lock);
}
