// SPDX-License-Identifier: GPL-2.0
/*
 * Links: from a member in the table to a peer that messages are exchanged with, and back.
 *
 *   OPENING   own rings are offered; the peer's are awaited
 *   UP        the peer's rings are checked and read; sending begins when the peer says UP, too
 *   DRAINING  nothing is sent; what is on its way is received, what is lent comes back
 *   CLOSED    neither side uses the other's memory; gone when the peer says so as well
 *
 * Everything here runs in the control work, under mr_lock, and may be repeated at any time: it
 * looks at what is and does the next step.
 */
#include <linux/log2.h>
#include <linux/module.h>
#include <linux/rcupdate.h>
#include <linux/slab.h>

#include "channel.h"

#define FREE_FAILURES 4 /* failed tries to link a member before a wait */
#define MAX_WAIT_BEATS 8
#define FORGIVE_BEATS 16 /* heartbeats after which one failure is forgotten */

static struct mr_peer *peer_at(struct mr_channel *ch, u32 index)
{
	return rcu_dereference_protected(ch->peers[index], lockdep_is_held(&mr_lock));
}

static void peer_release(struct kref *ref)
{
	struct mr_peer *peer = container_of(ref, struct mr_peer, ref);

	mr_queues_free(peer);
	if (peer->own_link)
		free_page((unsigned long)peer->own_link);
	kfree_rcu(peer, rcu);
}

void mr_peer_get(struct mr_peer *peer)
{
	kref_get(&peer->ref);
}
EXPORT_SYMBOL_GPL(mr_peer_get);

void mr_peer_put(struct mr_peer *peer)
{
	kref_put(&peer->ref, peer_release);
}
EXPORT_SYMBOL_GPL(mr_peer_put);

/*
 * Ends the link of a peer that broke the protocol. A new link needs a new generation of the peer.
 * Any context.
 */
void mr_peer_break(struct mr_peer *peer, const char *reason, u64 value)
{
	atomic64_inc(&peer->refused);
	if (READ_ONCE(peer->broken))
		return;
	WRITE_ONCE(peer->broken, true);
	WRITE_ONCE(peer->open, false);
	pr_warn("peer %.64s %s (%llu); its link ends\n", peer->name, reason, value);
	queue_work(peer->ch->work, &peer->ch->control);
}

static void ring_control(struct mr_peer *peer)
{
	/* Orders our writes before the doorbell. */
	wmb();
	mr_ring(peer->ch, peer->id, 0);
}

static void set_state(struct mr_peer *peer, u32 state)
{
	WRITE_ONCE(peer->state, state);
	mr_publish32(&peer->own_link->state, state);
	ring_control(peer);
}

static struct mr_memory *find_memory(u32 slot)
{
	struct mr_memory *memory;

	list_for_each_entry(memory, &mr_memories, list) {
		if (memory->slot == slot)
			return memory;
	}
	return NULL;
}

/* Finds the peer's directory in its memory. -EAGAIN: it does not match the table, perhaps yet. */
static int find_directory(struct mr_peer *peer, u64 dir_off)
{
	const struct mr_dir *dir = mr_peer_address(peer, dir_off, MR_PAGE_LEN, MR_PAGE_LEN);

	BUILD_BUG_ON(sizeof(struct mr_dir) > MR_PAGE_LEN);
	if (!dir)
		return -EPROTO;
	if (mr_observe64(&dir->magic) != MR_DIR_MAGIC ||
	    mr_read32(&dir->version) != MR_VERSION ||
	    mr_read32(&dir->member_id) != peer->id ||
	    mr_read64(&dir->generation) != peer->generation)
		return -EAGAIN;
	peer->dir = dir;
	return 0;
}

static int fill_link(struct mr_peer *peer)
{
	struct mr_channel *ch = peer->ch;
	struct mr_dir_entry *entry = &ch->dir->links[peer->index];
	struct mr_link *link;
	u64 off;
	int err;

	peer->own_link = mr_alloc_shared(ch, 0, &off);
	if (!peer->own_link)
		return -ENOMEM;
	link = peer->own_link;
	link->version = cpu_to_le32(MR_VERSION);
	link->from_id = cpu_to_le32(ch->id);
	link->to_id = cpu_to_le32(peer->id);
	link->from_generation = cpu_to_le64(ch->generation);
	link->to_generation = cpu_to_le64(peer->generation);
	link->queues = cpu_to_le32(peer->queues);
	link->clients = cpu_to_le32(mr_clients_mask());
	err = mr_queues_alloc(peer);
	if (err)
		return err;
	peer->state = MR_LINK_OPENING;
	link->state = cpu_to_le32(MR_LINK_OPENING);
	mr_publish64(&link->magic, MR_LINK_MAGIC);
	entry->peer_id = cpu_to_le32(peer->id);
	entry->peer_generation = cpu_to_le64(peer->generation);
	mr_publish64(&entry->link_off, off);
	return 0;
}

/* Makes a peer with its memory mapped and own rings offered. */
static struct mr_peer *peer_create(struct mr_channel *ch, u32 index, const struct mr_member *m,
				   struct mr_memory *memory)
{
	struct mr_peer *peer = kzalloc(sizeof(*peer), GFP_KERNEL);
	int err = -ENOMEM;

	if (!peer)
		return NULL;
	kref_init(&peer->ref);
	spin_lock_init(&peer->borrow_lock);
	peer->ch = ch;
	peer->index = index;
	peer->id = le32_to_cpu(m->id);
	peer->generation = le64_to_cpu(m->generation);
	peer->queues = ch->queues;
	peer->heartbeat_jiffies = jiffies;
	strscpy(peer->name, m->name, sizeof(peer->name));
	err = mr_memory_map(memory, peer);
	if (err) {
		pr_err("memory of %s in slot %u: cannot be mapped (%d)\n", peer->name,
		       memory->slot, err);
		goto put;
	}
	peer->memory = memory;
	peer->window_len = min(le64_to_cpu(m->window_len), memory->len);
	err = find_directory(peer, le64_to_cpu(m->dir_off));
	if (!err)
		err = fill_link(peer);
	if (!err)
		return peer;
	if (err != -EAGAIN)
		pr_err("link to %s: cannot be opened (%d)\n", peer->name, err);
	mr_memory_unmap(memory);
put:
	mr_peer_put(peer);
	return NULL;
}

/* Mapping a peer's memory is expensive: failures limit how often it is done. */
static void note_failure(struct mr_retry *retry)
{
	if (retry->failures < FREE_FAILURES + ilog2(MAX_WAIT_BEATS))
		retry->failures++;
	if (retry->failures >= FREE_FAILURES)
		retry->beats = 1 << (retry->failures - FREE_FAILURES);
}

static void age_retries(struct mr_channel *ch, u64 beat)
{
	u32 i;

	for (i = 0; i < MR_MAX_MEMBERS; i++) {
		struct mr_retry *retry = &ch->retry[i];

		if (retry->beats)
			retry->beats--;
		else if (retry->failures && beat % FORGIVE_BEATS == 0)
			retry->failures--;
	}
}

static void peer_destroy(struct mr_peer *peer)
{
	struct mr_channel *ch = peer->ch;
	u32 i;

	if (peer->broken) {
		ch->broken_generations[peer->index] = peer->generation;
		note_failure(&ch->retry[peer->index]);
	}
	mr_publish64(&ch->dir->links[peer->index].link_off, 0);
	RCU_INIT_POINTER(ch->peers[peer->index], NULL);
	/* Waits for receivers. Senders see under the lock that the peer's side is closed. */
	synchronize_net();
	for (i = 0; i < peer->queues; i++) {
		spin_lock_bh(&peer->queue[i].lock);
		peer->queue[i].peer_state = NULL;
		spin_unlock_bh(&peer->queue[i].lock);
	}
	mr_memory_unmap(peer->memory);
	peer->memory = NULL;
	mr_peer_put(peer);
}

static bool is_valid_link(const struct mr_peer *peer, const struct mr_link *link)
{
	return le64_to_cpu(link->magic) == MR_LINK_MAGIC &&
	       le32_to_cpu(link->version) == MR_VERSION &&
	       le32_to_cpu(link->from_id) == peer->id &&
	       le32_to_cpu(link->to_id) == peer->ch->id &&
	       le64_to_cpu(link->from_generation) == peer->generation &&
	       le64_to_cpu(link->to_generation) == peer->ch->generation;
}

/* Returns the peer's offer to us. NULL: none. */
static const struct mr_link *find_offer(struct mr_peer *peer)
{
	const struct mr_dir_entry *entry = &peer->dir->links[peer->ch->own_index];
	u64 off = mr_observe64(&entry->link_off);

	if (!off || mr_read32(&entry->peer_id) != peer->ch->id ||
	    mr_read64(&entry->peer_generation) != peer->ch->generation)
		return NULL;
	return mr_peer_address(peer, off, MR_PAGE_LEN, MR_PAGE_LEN);
}

static void try_attach(struct mr_peer *peer)
{
	const struct mr_link *offer = find_offer(peer);
	struct mr_link *copy;
	int err;

	if (!offer)
		return;
	copy = kmemdup(offer, sizeof(*copy), GFP_KERNEL);
	if (!copy)
		return;
	if (is_valid_link(peer, copy)) {
		err = mr_queues_attach(peer, copy);
		if (err) {
			mr_peer_break(peer, "offers a link that is wrong", -err);
		} else {
			peer->peer_link = offer;
			/* Pairs with is_attached() of the receiver. */
			smp_store_release(&peer->attached, true);
			set_state(peer, MR_LINK_UP);
		}
	}
	kfree(copy);
}

/*
 * Reads the state of the peer's side of the link. A closed peer takes its link out of the directory
 * before it reuses the page.
 */
static u32 read_link_state(struct mr_peer *peer)
{
	u32 state;

	if (peer->dead || !peer->peer_link)
		return peer->dead ? MR_LINK_CLOSED : MR_LINK_NONE;
	state = mr_observe32(&peer->peer_link->state);
	return find_offer(peer) == peer->peer_link ? state : MR_LINK_CLOSED;
}

static void set_open(struct mr_peer *peer, bool open)
{
	if (open != peer->open)
		pr_info("%s: %s\n", peer->name, open ? "up" : "down");
	WRITE_ONCE(peer->open, open);
	peer->up_clients =
		mr_clients_update_peer(peer, open ? mr_read32(&peer->peer_link->clients) : 0);
}

static bool is_silent(const struct mr_peer *peer)
{
	return time_after(jiffies,
			  peer->heartbeat_jiffies + msecs_to_jiffies(peer->ch->dead_after_ms));
}

/* Whether all messages that either side sent have arrived. */
static bool rings_are_empty(struct mr_peer *peer)
{
	if (!peer->attached || peer->broken)
		return true;
	return mr_queues_are_drained(peer) &&
	       (peer->dead || is_silent(peer) || mr_peer_is_idle(peer));
}

static void drain(struct mr_peer *peer)
{
	bool empty;
	u32 peer_link_state;

	/* The peer may have seen our offer before we looked at its own. */
	if (!peer->peer_link)
		peer->peer_link = find_offer(peer);
	peer_link_state = read_link_state(peer);
	empty = rings_are_empty(peer);
	/* There may be no doorbell for the last entries. */
	if (!empty)
		mr_vectors_kick(peer->ch);
	if (READ_ONCE(peer->borrowed))
		mr_pages_flush(peer->ch);
	if (peer->peer_link && !peer->broken && peer_link_state != MR_LINK_DRAINING &&
	    peer_link_state != MR_LINK_CLOSED)
		return;
	if (!empty || mr_queues_reclaim(peer) || READ_ONCE(peer->borrowed))
		return;
	/* The peer may reuse its rings once it sees this state: receivers no longer read them. */
	WRITE_ONCE(peer->state, MR_LINK_CLOSED);
	synchronize_net();
	/* A receiver that was running has borrowed meanwhile. */
	if (READ_ONCE(peer->borrowed)) {
		WRITE_ONCE(peer->state, MR_LINK_DRAINING);
		return;
	}
	set_state(peer, MR_LINK_CLOSED);
}

/* Whether the table has the peer unchanged since the link was made. */
static bool is_wanted(struct mr_peer *peer, const struct mr_member *m)
{
	bool is_same = le32_to_cpu(m->id) == peer->id &&
		    le64_to_cpu(m->generation) == peer->generation;
	u32 state = le32_to_cpu(m->state);

	if (!is_same || state == MR_MEMBER_DEAD || state == MR_MEMBER_NONE)
		peer->dead = true;
	return is_same && state == MR_MEMBER_ACTIVE && !peer->ch->leaving && !peer->broken;
}

static void peer_step(struct mr_peer *peer, const struct mr_member *m)
{
	bool wanted = is_wanted(peer, m);

	if (peer->state == MR_LINK_OPENING && wanted)
		try_attach(peer);
	if (peer->state == MR_LINK_UP) {
		u32 peer_link_state = read_link_state(peer);

		if (peer_link_state == MR_LINK_DRAINING || peer_link_state == MR_LINK_CLOSED)
			wanted = false;
		set_open(peer, wanted && peer_link_state == MR_LINK_UP && !is_silent(peer));
	}
	if (!wanted && (peer->state == MR_LINK_OPENING || peer->state == MR_LINK_UP)) {
		set_open(peer, false);
		mr_queues_wait_for_senders(peer);
		set_state(peer, MR_LINK_DRAINING);
	}
	if (peer->state == MR_LINK_DRAINING)
		drain(peer);
	/* The peer may still read our side until it has closed, too. */
	if (peer->state == MR_LINK_CLOSED &&
	    (!peer->peer_link || peer->broken || read_link_state(peer) == MR_LINK_CLOSED))
		peer_destroy(peer);
}

static bool is_linkable(struct mr_channel *ch, u32 index)
{
	const struct mr_member *m = &ch->table[index];

	return !ch->leaving && index != ch->own_index && le32_to_cpu(m->id) != ch->id &&
	       le32_to_cpu(m->id) <= 65535 && le32_to_cpu(m->state) == MR_MEMBER_ACTIVE &&
	       m->slot && le64_to_cpu(m->generation) != ch->broken_generations[index];
}

static void peer_try_create(struct mr_channel *ch, u32 index)
{
	const struct mr_member *m = &ch->table[index];
	struct mr_memory *memory = find_memory(le32_to_cpu(m->slot));
	struct mr_peer *peer;

	if (!memory || memory->mapped || ch->retry[index].beats)
		return;
	peer = peer_create(ch, index, m, memory);
	if (!peer) {
		note_failure(&ch->retry[index]);
		return;
	}
	rcu_assign_pointer(ch->peers[index], peer);
	ring_control(peer);
}

void mr_links_update(struct mr_channel *ch)
{
	u32 i;

	for (i = 0; i < MR_MAX_MEMBERS; i++) {
		if (!peer_at(ch, i) && is_linkable(ch, i))
			peer_try_create(ch, i);
		if (peer_at(ch, i))
			peer_step(peer_at(ch, i), &ch->table[i]);
	}
}

/*
 * Does what each heartbeat needs: checks the peers' heartbeats; takes back slots that were released
 * while nothing is sent; frees pages that wait for a CPU; receives messages whose doorbell is
 * missing. Under KVM none is missing; QEMU's emulation drops memory barriers when a guest cannot
 * have a second CPU, and then a doorbell can be missed.
 */
void mr_links_beat(struct mr_channel *ch)
{
	bool has_entries = false, has_borrowed = false;
	u32 i;

	age_retries(ch, le64_to_cpu(ch->dir->heartbeat));

	for (i = 0; i < MR_MAX_MEMBERS; i++) {
		struct mr_peer *peer = peer_at(ch, i);
		u64 beat;

		if (!peer)
			continue;
		beat = mr_read64(&peer->dir->heartbeat);
		if (beat != peer->heartbeat) {
			peer->heartbeat = beat;
			peer->heartbeat_jiffies = jiffies;
		}
		if (peer->state == MR_LINK_CLOSED)
			continue;
		mr_queues_reclaim(peer);
		has_entries |= !mr_queues_are_drained(peer);
		has_borrowed |= READ_ONCE(peer->borrowed) != 0;
	}
	if (has_entries)
		mr_vectors_kick(ch);
	if (has_borrowed)
		mr_pages_flush(ch);
}

bool mr_links_are_closed(struct mr_channel *ch)
{
	u32 i;

	for (i = 0; i < MR_MAX_MEMBERS; i++) {
		if (peer_at(ch, i))
			return false;
	}
	return true;
}

/* Publishes which clients take messages here, and tells clients which peers take their messages. */
void mr_links_publish_clients(struct mr_channel *ch)
{
	u32 i;

	for (i = 0; i < MR_MAX_MEMBERS; i++) {
		struct mr_peer *peer = peer_at(ch, i);

		if (!peer)
			continue;
		WRITE_ONCE(peer->own_link->clients, cpu_to_le32(mr_clients_mask()));
		ring_control(peer);
	}
	mr_links_update(ch);
}

bool mr_links_are_drained(struct mr_channel *ch)
{
	u32 i;

	for (i = 0; i < MR_MAX_MEMBERS; i++) {
		struct mr_peer *peer = peer_at(ch, i);

		if (peer && !peer->broken && peer->state != MR_LINK_CLOSED &&
		    !mr_queues_are_drained(peer))
			return false;
	}
	return true;
}
