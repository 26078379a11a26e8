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
#define LINES_AT_ONCE 16 /* cache lines that are requested together */

static void reclaim_slot(struct mr_queue *q, u16 slot)
{
	struct mr_lent *lent = &q->lent[slot];

	while (lent->pages_len)
		put_page(lent->pages[--lent->pages_len]);
	q->free_slots[q->free_len++] = slot;
	if (q->free_len == MR_SLOTS)
		module_put(THIS_MODULE);
}

/* Takes back the slots that the peer has released. */
static void reclaim_slots(struct mr_queue *q)
{
	u32 done = mr_observe32(&q->peer_state->done);

	if (done - q->done_seen > MR_SLOTS - q->free_len) {
		mr_peer_break(q->peer, "released more slots than it had", done - q->done_seen);
		return;
	}
	for (; q->done_seen != done; q->done_seen++) {
		u32 index = q->done_seen % MR_DONE_LEN;
		u16 slot = le16_to_cpu(READ_ONCE(q->peer_state->done_slots[index]));

		if (slot >= MR_SLOTS || !q->lent[slot].pages_len) {
			mr_peer_break(q->peer, "released a slot that it did not have", slot);
			return;
		}
		reclaim_slot(q, slot);
	}
}

/* Reads which entries and slots the peer has taken and released. Caller holds the lock. */
void mr_queue_reclaim(struct mr_queue *q)
{
	u32 taken;

	if (!q->peer_state || q->peer->broken)
		return;
	reclaim_slots(q);
	taken = mr_observe32(&q->peer_state->taken);
	if (taken == q->taken_seen)
		return;
	if (taken - q->taken_seen > q->produced - q->taken_seen) {
		mr_peer_break(q->peer, "took more than there was", taken - q->taken_seen);
		return;
	}
	q->taken_seen = taken;
	q->fifo_tail = le32_to_cpu(q->ring[(taken - 1) % MR_RING_LEN].fifo_end);
}

/* Takes back all slots: the peer no longer reads. */
void mr_queue_release_all(struct mr_queue *q)
{
	u32 slot;

	spin_lock_bh(&q->lock);
	for (slot = 0; slot < MR_SLOTS; slot++) {
		if (q->lent[slot].pages_len)
			reclaim_slot(q, slot);
	}
	spin_unlock_bh(&q->lock);
}

u32 mr_queue_count_lent(struct mr_queue *q)
{
	return MR_SLOTS - READ_ONCE(q->free_len);
}

/*
 * Returns an address in the FIFO. Its chunks are not contiguous: *len is cut to the rest of the
 * chunk with @pos.
 */
static void *fifo_address(const struct mr_queue *q, u32 pos, u32 *len)
{
	u32 off = pos % (q->fifo_chunks * MR_CHUNK_LEN);

	*len = min_t(u32, *len, MR_CHUNK_LEN - off % MR_CHUNK_LEN);
	return q->fifo[off / MR_CHUNK_LEN] + off % MR_CHUNK_LEN;
}

static void fifo_write(struct mr_queue *q, u32 pos, const void *from, u32 len)
{
	while (len) {
		u32 part = len;
		void *to = fifo_address(q, pos, &part);

		memcpy(to, from, part);
		pos += part;
		from += part;
		len -= part;
	}
}

static void fifo_write_pages(struct mr_queue *q, u32 pos, const struct mr_sg *sg)
{
	u32 off = sg->off, remaining = sg->len;

	while (remaining) {
		struct page *page = nth_page(sg->page, off / PAGE_SIZE);
		u32 part = min_t(u32, remaining, PAGE_SIZE - off % PAGE_SIZE);
		void *from = kmap_local_page(page);

		fifo_write(q, pos, from + off % PAGE_SIZE, part);
		kunmap_local(from);
		pos += part;
		off += part;
		remaining -= part;
	}
}

static void claim_lines(u8 *line, u32 len)
{
	u8 *end = line + len;
	unsigned int i;

	for (; line + LINES_AT_ONCE * L1_CACHE_BYTES <= end;
	     line += LINES_AT_ONCE * L1_CACHE_BYTES) {
#pragma GCC unroll 16
		for (i = 0; i < LINES_AT_ONCE; i++)
			WRITE_ONCE(line[i * L1_CACHE_BYTES], 0);
	}
	for (; line < end; line += L1_CACHE_BYTES)
		WRITE_ONCE(*line, 0);
}

/*
 * Requests the cache lines of a range before it is written. Bytes that the peer has read are in its
 * CPU's cache, and writing there word by word waits for one line after the other. With one store
 * for each line, and little between them, many requests overlap, which matters most where its CPU
 * shares no cache with ours.
 */
static void fifo_claim_lines(struct mr_queue *q, u32 pos, u32 len)
{
	while (len) {
		u32 part = len;
		void *lines = fifo_address(q, pos, &part);

		claim_lines(lines, part);
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
	if (tx->len >= LINES_AT_ONCE * L1_CACHE_BYTES)
		fifo_claim_lines(q, pos, tx->len);
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
	u32 off = sg->off, remaining = sg->len;

	while (remaining) {
		struct page *page = nth_page(sg->page, off / PAGE_SIZE);
		u32 part = min_t(u32, remaining, PAGE_SIZE - off % PAGE_SIZE);
		struct mr_seg *seg = &slot->segs[*len];
		u64 page_off;

		if (*len == MR_MAX_SEGS ||
		    mr_own_offset(q->peer->ch, page_to_phys(page), PAGE_SIZE, &page_off))
			return -ERANGE;
		seg->off = cpu_to_le64(page_off + off % PAGE_SIZE);
		seg->len = cpu_to_le32(part);
		lent->pages[(*len)++] = page;
		off += part;
		remaining -= part;
	}
	return 0;
}

/* Puts a message by reference. Not 0: it is to be copied. */
static int put_reference(struct mr_queue *q, struct mr_entry *entry, const struct mr_tx *tx)
{
	struct mr_slot *slot;
	struct mr_lent *lent;
	u32 i, pages = 0;
	u16 slot_index;

	if (!tx->may_refer || tx->head_len > MR_MAX_HEAD_LEN || !tx->sg_len || !q->free_len ||
	    READ_ONCE(q->peer_state->want_copies))
		return -EAGAIN;
	slot_index = q->free_slots[q->free_len - 1];
	slot = &q->slots[slot_index];
	lent = &q->lent[slot_index];
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
	entry->slot = cpu_to_le16(slot_index);
	q->stats.referred++;
	q->stats.referred_bytes += tx->len;
	return 0;
}

/*
 * Requests a doorbell for when the peer has taken half of the entries. False: it has taken some
 * meanwhile.
 */
bool mr_queue_request_doorbell(struct mr_queue *q)
{
	u32 old_taken = q->taken_seen;

	WRITE_ONCE(q->own_state->taken_event,
		   cpu_to_le32(old_taken + (q->produced - old_taken) / 2));
	/* Orders the event before the index; the peer does it the other way round. */
	virt_mb();
	mr_queue_reclaim(q);
	return q->taken_seen == old_taken;
}

static bool wait_for_room(struct mr_queue *q, u8 client)
{
	WRITE_ONCE(q->waiting_clients, q->waiting_clients | BIT(client));
	q->stats.full++;
	/*
	 * Orders the waiting clients before the event: its doorbell runs reclaim() in channel_rx.c,
	 * which reads them.
	 */
	virt_wmb();
	return mr_queue_request_doorbell(q);
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
	mr_publish32(&q->own_state->produced, old + 1);
	/* Orders the index before the event: see request_doorbell() in channel_rx.c. */
	virt_mb();
	if (mr_has_passed(mr_read32(&q->peer_state->produced_event), old + 1, old)) {
		q->stats.kicks++;
		mr_ring(q->peer->ch, q->peer->id, 1 + q->index);
	}
}

int mr_send(struct mr_peer *peer, unsigned int queue, const struct mr_tx *tx)
{
	struct mr_queue *q = &peer->queue[queue];
	bool has_ceiling = READ_ONCE(peer->ch->ceiling.is_set);
	int err = -ENOTCONN;

	if (tx->len > MR_MAX_MESSAGE_LEN || queue >= peer->queues)
		return -EMSGSIZE;
	spin_lock_bh(&q->lock);
	/* A peer whose client is unregistered takes the earlier messages, and no later ones. */
	if (!READ_ONCE(peer->open) ||
	    !(mr_read32(&peer->peer_link->clients) & BIT(tx->client)))
		goto out;
	err = -ENOSPC;
	if (unlikely(has_ceiling) && !mr_ceiling_may_send(q, tx))
		goto out;
	mr_queue_reclaim(q);
	do {
		err = put_entry(q, tx);
	} while (err == -ENOSPC && !wait_for_room(q, tx->client));
	if (!err) {
		q->stats.sent++;
		q->stats.sent_bytes += tx->len;
		publish(q);
		if (unlikely(has_ceiling))
			mr_ceiling_charge(q, tx->len);
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
		idle = !q->peer_state || mr_read32(&q->peer_state->taken) == q->produced;
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
