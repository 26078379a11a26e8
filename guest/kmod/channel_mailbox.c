// SPDX-License-Identifier: GPL-2.0
/*
 * The mailbox: messages of the host to this guest, and of this guest to the host.
 */
#include <linux/module.h>
#include <linux/random.h>

#include "channel.h"

/* A table that is being written is complete within microseconds. */
#define MAX_TRIES 1000

static struct mr_host *host_half(const struct mr_channel *ch)
{
	return (struct mr_host *)ch->mailbox;
}

static struct mr_guest *guest_half(const struct mr_channel *ch)
{
	return (struct mr_guest *)(ch->mailbox + MR_GUEST_OFF);
}

/* Reads the constant fields of the mailbox. -ENODEV: the device is another use of ivshmem. */
int mr_mailbox_open(struct mr_channel *ch)
{
	const struct mr_host *h = host_half(ch);
	u32 version;

	BUILD_BUG_ON(sizeof(struct mr_host) > MR_TABLE_OFF);
	BUILD_BUG_ON(MR_TABLE_OFF + sizeof(struct mr_member) * MR_MAX_MEMBERS > MR_EXCLUDE_OFF);
	BUILD_BUG_ON(MR_EXCLUDE_OFF + sizeof(struct mr_exclude) * MR_MAX_EXCLUDES > MR_GUEST_OFF);
	BUILD_BUG_ON(sizeof(struct mr_guest) > MR_MAILBOX_LEN - MR_GUEST_OFF);
	if (mr_observe64(&h->magic) != MR_HOST_MAGIC)
		return -ENODEV;
	version = le32_to_cpu(h->version);
	if (version != MR_VERSION) {
		pr_err("mailbox of the host has version %u, this kernel module %u\n", version,
		       MR_VERSION);
		return -EPROTO;
	}
	ch->id = le32_to_cpu(h->member_id);
	ch->host_id = le32_to_cpu(h->host_id);
	ch->vectors = le32_to_cpu(h->vectors);
	ch->heartbeat_ms = clamp(le32_to_cpu(h->heartbeat_ms), 10u, 60000u);
	ch->dead_after_ms = clamp(le32_to_cpu(h->dead_after_ms), ch->heartbeat_ms, 600000u);
	ch->window_len = le64_to_cpu(h->window_len);
	ch->regions_len = le32_to_cpu(h->regions_len);
	if (ch->vectors < 2 || ch->vectors > MR_MAX_VECTORS || ch->id > 65535 ||
	    ch->host_id > 65535 || ch->regions_len > MR_MAX_REGIONS)
		return -EPROTO;
	memcpy(ch->regions, h->regions, sizeof(ch->regions));
	ch->queues = ch->vectors - 1;
	ch->generation = get_random_u64();
	return 0;
}

/* Copies a consistent snapshot of the host's half. */
static bool copy_host_half(struct mr_channel *ch)
{
	const struct mr_host *h = host_half(ch);
	unsigned int i;

	for (i = 0; i < MAX_TRIES; i++) {
		u32 seq = mr_observe32(&h->table_seq);

		if (seq & 1) {
			cpu_relax();
			continue;
		}
		memcpy(ch->host_half, ch->mailbox, sizeof(ch->host_half));
		/* Orders the copy before the second read of the number. */
		virt_rmb();
		if (mr_read32(&h->table_seq) == seq)
			return true;
	}
	return false;
}

/*
 * Copies members, excluded flows and ceilings from the mailbox. False: the host is writing them,
 * and rings afterwards.
 */
bool mr_mailbox_read_table(struct mr_channel *ch)
{
	const struct mr_host *h = (const struct mr_host *)ch->host_half;
	unsigned int i;

	if (!copy_host_half(ch))
		return false;
	memcpy(ch->table, ch->host_half + MR_TABLE_OFF, sizeof(ch->table));
	memcpy(ch->excludes, ch->host_half + MR_EXCLUDE_OFF, sizeof(ch->excludes));
	ch->excludes_seq = le32_to_cpu(h->excludes_seq);
	ch->excludes_len = min_t(u32, le32_to_cpu(h->excludes_len), MR_MAX_EXCLUDES);
	mr_ceiling_set(ch, h);
	for (i = 0; i < MR_MAX_MEMBERS; i++) {
		ch->table[i].name[MR_NAME_LEN - 1] = 0;
		if (le32_to_cpu(ch->table[i].state) != MR_MEMBER_NONE &&
		    le32_to_cpu(ch->table[i].id) == ch->id)
			ch->own_index = i;
	}
	return true;
}

static void report_link(const struct mr_peer *peer, struct mr_link_status *status)
{
	u64 sent = 0, received = 0, sent_bytes = 0, referred_bytes = 0, received_bytes = 0;
	u32 i, lent = 0;

	for (i = 0; i < peer->queues; i++) {
		const struct mr_queue_stats *stats = &peer->queue[i].stats;

		sent += stats->sent;
		received += stats->received;
		received_bytes += stats->received_bytes;
		sent_bytes += stats->sent_bytes;
		referred_bytes += stats->referred_bytes;
		lent += mr_queue_count_lent(&peer->queue[i]);
	}
	status->peer_id = cpu_to_le32(peer->id);
	status->borrowed = cpu_to_le32(READ_ONCE(peer->borrowed));
	status->lent = cpu_to_le32(lent);
	status->sent = cpu_to_le64(sent);
	status->received = cpu_to_le64(received);
	status->sent_bytes = cpu_to_le64(sent_bytes);
	status->referred_bytes = cpu_to_le64(referred_bytes);
	status->received_bytes = cpu_to_le64(received_bytes);
	status->refused = cpu_to_le64(atomic64_read(&peer->refused));
	/* Written last: the host acts on it. */
	mr_publish32(&status->state, peer->state);
}

/* Writes this guest's state to the mailbox, and rings the host when it has changed. */
void mr_mailbox_report(struct mr_channel *ch, u32 state)
{
	struct mr_guest *g = guest_half(ch);
	bool has_changed = le32_to_cpu(g->state) != state;
	u64 off = 0;
	unsigned int i;

	for (i = 0; i < MR_MAX_MEMBERS; i++) {
		struct mr_peer *peer = rcu_dereference_protected(ch->peers[i],
								 lockdep_is_held(&mr_lock));
		u32 old = le32_to_cpu(g->links[i].state);

		if (peer)
			report_link(peer, &g->links[i]);
		else
			WRITE_ONCE(g->links[i].state, cpu_to_le32(MR_LINK_NONE));
		has_changed |= le32_to_cpu(g->links[i].state) != old;
	}
	g->version = cpu_to_le32(MR_VERSION);
	g->generation = cpu_to_le64(ch->generation);
	mr_own_offset(ch, virt_to_phys(ch->dir), MR_PAGE_LEN, &off);
	g->dir_off = cpu_to_le64(off);
	WRITE_ONCE(g->heartbeat, ch->dir->heartbeat);
	has_changed |= le32_to_cpu(g->excludes_seq) != ch->held_excludes_seq;
	WRITE_ONCE(g->excludes_seq, cpu_to_le32(ch->held_excludes_seq));
	mr_publish32(&g->state, state);
	mr_publish64(&g->magic, MR_GUEST_MAGIC);
	if (has_changed)
		mr_mailbox_ring_host(ch);
}

void mr_mailbox_ring_host(struct mr_channel *ch)
{
	/* Orders our writes before the doorbell. */
	wmb();
	mr_ring(ch, ch->host_id, 0);
}

static bool fill_member(const struct mr_channel *ch, const struct mr_member *m,
			struct mr_member_info *info)
{
	u32 i, state = le32_to_cpu(m->state);

	info->id = le32_to_cpu(m->id);
	info->self = info->id == ch->id;
	if (state != MR_MEMBER_ACTIVE && !(info->self && state != MR_MEMBER_NONE))
		return false;
	info->macs_len = min_t(u32, le32_to_cpu(m->macs_len), MR_MAX_MACS);
	info->addresses_len = min_t(u32, le32_to_cpu(m->addresses_len), MR_MAX_ADDRESSES);
	for (i = 0; i < info->macs_len; i++)
		memcpy(info->macs[i], m->macs[i], ETH_ALEN);
	for (i = 0; i < info->addresses_len; i++)
		memcpy(&info->addresses[i], m->addresses[i], sizeof(struct in6_addr));
	return true;
}

/* Called from ->table_changed() and ->peer_up(), where the lock is held. */
unsigned int mr_members(struct mr_member_info members[MR_MAX_MEMBERS])
{
	unsigned int i, count = 0;

	lockdep_assert_held(&mr_lock);
	for (i = 0; mr_channel && i < MR_MAX_MEMBERS; i++) {
		members[count].index = i;
		if (fill_member(mr_channel, &mr_channel->table[i], &members[count]))
			count++;
	}
	return count;
}
EXPORT_SYMBOL_GPL(mr_members);

unsigned int mr_excludes(struct mr_exclude excludes[MR_MAX_EXCLUDES], u32 *seq)
{
	lockdep_assert_held(&mr_lock);
	*seq = 0;
	if (!mr_channel)
		return 0;
	*seq = mr_channel->excludes_seq;
	memcpy(excludes, mr_channel->excludes, mr_channel->excludes_len * sizeof(*excludes));
	return mr_channel->excludes_len;
}
EXPORT_SYMBOL_GPL(mr_excludes);

void mr_excludes_hold(u32 seq)
{
	lockdep_assert_held(&mr_lock);
	if (mr_channel)
		mr_channel->held_excludes_seq = seq;
}
EXPORT_SYMBOL_GPL(mr_excludes_hold);
