// SPDX-License-Identifier: GPL-2.0
/*
 * Sending: a message goes into the own ring, its bytes into the FIFO or, by reference, nowhere. All
 * writes go to own memory; of the peer's, three indices are read.
 */
#include <linux/highmem.h>
#include <linux/mm.h>
#include <linux/module.h>

#include "channel.h"

#define FIFO_ALIGN 64
#define LINES 16 /* that are asked for at a time */

static void take_back(struct mr_queue *q, u16 slot)
{
	struct mr_lent *lent = &q->lent[slot];

	while (lent->pages_len)
		put_page(lent->pages[--lent->pages_len]);
	q->free[q->free_len++] = slot;
	if (q->free_len == MR_SLOTS)
		module_put(THIS_MODULE);
}

/* Takes back the slots that the peer has released. */
static void reclaim_slots(struct mr_queue *q)
{
	u32 done = mr_observe32(&q->theirs->done);

	if (done - q->done_seen > MR_SLOTS - q->free_len) {
		mr_peer_break(q->peer, "released more slots than it had", done - q->done_seen);
		return;
	}
	for (; q->done_seen != done; q->done_seen++) {
		u32 at = q->done_seen % MR_DONE_LEN;
		u16 slot = le16_to_cpu(READ_ONCE(q->theirs->done_slots[at]));

		if (slot >= MR_SLOTS || !q->lent[slot].pages_len) {
			mr_peer_break(q->peer, "released a slot that it did not have", slot);
			return;
		}
		take_back(q, slot);
	}
}

/* Reads which entries and slots the peer has taken and released. Caller holds the lock. */
void mr_queue_reclaim(struct mr_queue *q)
{
	u32 taken;

	if (!q->theirs || q->peer->broken)
		return;
	reclaim_slots(q);
	taken = mr_observe32(&q->theirs->taken);
	if (taken == q->taken_seen)
		return;
	if (taken - q->taken_seen > q->produced - q->taken_seen) {
		mr_peer_break(q->peer, "took more than there was", taken - q->taken_seen);
		return;
	}
	q->taken_seen = taken;
	q->fifo_tail = le32_to_cpu(q->ring[(taken - 1) % MR_RING_LEN].fifo_end);
}

/* Takes everything back: the peer no longer reads. */
void mr_queue_release_all(struct mr_queue *q)
{
	u32 slot;

	spin_lock_bh(&q->lock);
	for (slot = 0; slot < MR_SLOTS; slot++) {
		if (q->lent[slot].pages_len)
			take_back(q, slot);
	}
	spin_unlock_bh(&q->lock);
}

u32 mr_queue_lent(struct mr_queue *q)
{
	return MR_SLOTS - READ_ONCE(q->free_len);
}

/* Returns an address in the FIFO. Its pieces are not contiguous: *len is cut to the rest of the
 * one with @pos. */
static void *fifo_at(const struct mr_queue *q, u32 pos, u32 *len)
{
	u32 at = pos % (q->fifo_chunks * MR_CHUNK_LEN);

	*len = min_t(u32, *len, MR_CHUNK_LEN - at % MR_CHUNK_LEN);
	return q->fifo[at / MR_CHUNK_LEN] + at % MR_CHUNK_LEN;
}

static void fifo_write(struct mr_queue *q, u32 pos, const void *from, u32 len)
{
	while (len) {
		u32 part = len;
		void *to = fifo_at(q, pos, &part);

		memcpy(to, from, part);
		pos += part;
		from += part;
		len -= part;
	}
}

static void fifo_write_pages(struct mr_queue *q, u32 pos, const struct mr_sg *sg)
{
	u32 off = sg->off, left = sg->len;

	while (left) {
		struct page *page = nth_page(sg->page, off / PAGE_SIZE);
		u32 part = min_t(u32, left, PAGE_SIZE - off % PAGE_SIZE);
		void *from = kmap_local_page(page);

		fifo_write(q, pos, from + off % PAGE_SIZE, part);
		kunmap_local(from);
		pos += part;
		off += part;
		left -= part;
	}
}

static void own_lines(u8 *at, u32 len)
{
	u8 *end = at + len;
	unsigned int i;

	for (; at + LINES * L1_CACHE_BYTES <= end; at += LINES * L1_CACHE_BYTES) {
#pragma GCC unroll 16
		for (i = 0; i < LINES; i++)
			WRITE_ONCE(at[i * L1_CACHE_BYTES], 0);
	}
	for (; at < end; at += L1_CACHE_BYTES)
		WRITE_ONCE(*at, 0);
}

/*
 * Bytes that the peer has read are in its CPU's cache, and writing there word by word waits for one
 * line after the other. With one store for each line, and little between them, many requests
 * overlap, which matters most where its CPU shares no cache with ours.
 */
static void fifo_own(struct mr_queue *q, u32 pos, u32 len)
{
	while (len) {
		u32 part = len;
		void *at = fifo_at(q, pos, &part);

		own_lines(at, part);
		pos += part;
		len -= part;
	}
}

static int put_copy(struct mr_queue *q, struct mr_entry *entry, const struct mr_tx *tx)
{
	u32 pos = q->fifo_head, end = pos + ALIGN(tx->len, FIFO_ALIGN);
	u32 i;

	if (end - q->fifo_tail > q->fifo_chunks * MR_CHUNK_LEN)
		return -ENOSPC;
	entry->kind = MR_KIND_COPY;
	entry->fifo_pos = cpu_to_le32(pos);
	if (tx->len >= LINES * L1_CACHE_BYTES)
		fifo_own(q, pos, tx->len);
	fifo_write(q, pos, tx->head, tx->head_len);
	pos += tx->head_len;
	for (i = 0; i < tx->sg_len; i++) {
		fifo_write_pages(q, pos, &tx->sg[i]);
		pos += tx->sg[i].len;
	}
	q->fifo_head = end;
	return 0;
}

/* Adds the pages of one piece to a slot. */
static int refer_pages(struct mr_queue *q, struct mr_slot *slot, struct mr_lent *lent, u32 *len,
		       const struct mr_sg *sg)
{
	u32 off = sg->off, left = sg->len;

	while (left) {
		struct page *page = nth_page(sg->page, off / PAGE_SIZE);
		u32 part = min_t(u32, left, PAGE_SIZE - off % PAGE_SIZE);
		struct mr_seg *seg = &slot->segs[*len];
		u64 at;

		if (*len == MR_MAX_SEGS ||
		    mr_own_offset(q->peer->ch, page_to_phys(page), PAGE_SIZE, &at))
			return -ERANGE;
		seg->off = cpu_to_le64(at + off % PAGE_SIZE);
		seg->len = cpu_to_le32(part);
		lent->pages[(*len)++] = page;
		off += part;
		left -= part;
	}
	return 0;
}

/* Puts a message by reference. Not 0: it is to be copied. */
static int put_reference(struct mr_queue *q, struct mr_entry *entry, const struct mr_tx *tx)
{
	struct mr_slot *slot;
	struct mr_lent *lent;
	u32 i, pages = 0;
	u16 at;

	if (!tx->may_refer || tx->head_len > MR_MAX_HEAD_LEN || !tx->sg_len || !q->free_len ||
	    READ_ONCE(q->theirs->want_copies))
		return -EAGAIN;
	at = q->free[q->free_len - 1];
	slot = &q->slots[at];
	lent = &q->lent[at];
	for (i = 0; i < tx->sg_len; i++) {
		int err = refer_pages(q, slot, lent, &pages, &tx->sg[i]);

		if (err)
			return err;
	}
	/* Lent pages must come back before the kernel module is unloaded. */
	if (q->free_len == MR_SLOTS)
		__module_get(THIS_MODULE);
	q->free_len--;
	for (i = 0; i < pages; i++)
		get_page(lent->pages[i]);
	lent->pages_len = pages;
	slot->head_len = cpu_to_le32(tx->head_len);
	slot->segs_len = cpu_to_le32(pages);
	memcpy(slot->head, tx->head, tx->head_len);
	entry->kind = MR_KIND_REFERENCE;
	entry->slot = cpu_to_le16(at);
	q->stats.referred++;
	q->stats.referred_bytes += tx->len;
	return 0;
}

/* Requests a doorbell when half of the entries have been taken. False: some have been just now. */
bool mr_queue_await(struct mr_queue *q)
{
	u32 before = q->taken_seen;

	WRITE_ONCE(q->mine->taken_event,
		   cpu_to_le32(before + (q->produced - before) / 2));
	/* Orders the event before the index; the peer does it the other way round. */
	virt_mb();
	mr_queue_reclaim(q);
	return q->taken_seen == before;
}

static bool wait_for_room(struct mr_queue *q, u8 client)
{
	WRITE_ONCE(q->waiting, q->waiting | BIT(client));
	q->stats.full++;
	/* Orders the waiting clients before the event: see reclaim() in channel_rx.c, which the
	 * doorbell runs. */
	virt_wmb();
	return mr_queue_await(q);
}

static int put_entry(struct mr_queue *q, const struct mr_tx *tx)
{
	struct mr_entry *entry = &q->ring[q->produced % MR_RING_LEN];
	int err;

	if (q->produced - q->taken_seen >= MR_RING_LEN)
		return -ENOSPC;
	err = put_reference(q, entry, tx);
	if (err)
		err = put_copy(q, entry, tx);
	if (err)
		return err;
	entry->client = tx->client;
	entry->len = cpu_to_le32(tx->len);
	entry->fifo_end = cpu_to_le32(q->fifo_head);
	memcpy(entry->meta, tx->meta, MR_META_LEN);
	return 0;
}

static void publish(struct mr_queue *q)
{
	u32 old = q->produced;

	q->produced = old + 1;
	/* Makes the entry visible before the index. */
	mr_publish32(&q->mine->produced, old + 1);
	/* Orders the index before the event: see rearm() in channel_rx.c. */
	virt_mb();
	if (mr_passed(mr_read32(&q->theirs->produced_event), old + 1, old)) {
		q->stats.kicks++;
		mr_ring(q->peer->ch, q->peer->id, 1 + q->index);
	}
}

int mr_send(struct mr_peer *peer, unsigned int queue, const struct mr_tx *tx)
{
	struct mr_queue *q = &peer->queue[queue];
	int err = -ENOTCONN;

	if (tx->len > MR_MAX_MESSAGE_LEN || queue >= peer->queues)
		return -EMSGSIZE;
	spin_lock_bh(&q->lock);
	/* A peer whose client is unregistered takes messages sent before, and none later. */
	if (!READ_ONCE(peer->open) ||
	    !(mr_read32(&peer->their_link->clients) & BIT(tx->client)))
		goto out;
	mr_queue_reclaim(q);
	do {
		err = put_entry(q, tx);
	} while (err == -ENOSPC && !wait_for_room(q, tx->client));
	if (!err) {
		q->stats.sent++;
		q->stats.sent_bytes += tx->len;
		publish(q);
	}
out:
	spin_unlock_bh(&q->lock);
	return err;
}
EXPORT_SYMBOL_GPL(mr_send);

bool mr_peer_is_idle(struct mr_peer *peer)
{
	bool idle = true;
	u32 i;

	for (i = 0; i < peer->queues && idle; i++) {
		struct mr_queue *q = &peer->queue[i];

		spin_lock_bh(&q->lock);
		idle = !q->theirs || mr_read32(&q->theirs->taken) == q->produced;
		spin_unlock_bh(&q->lock);
	}
	return idle;
}
EXPORT_SYMBOL_GPL(mr_peer_is_idle);

unsigned int mr_peer_queues(const struct mr_peer *peer)
{
	return min(peer->queues, num_online_cpus());
}
EXPORT_SYMBOL_GPL(mr_peer_queues);

u32 mr_peer_index(const struct mr_peer *peer)
{
	return peer->index;
}
EXPORT_SYMBOL_GPL(mr_peer_index);
