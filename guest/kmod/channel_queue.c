// SPDX-License-Identifier: GPL-2.0
/*
 * Memory of a link: own rings that the peer reads, and the places of the peer's.
 */
#include <linux/gfp.h>
#include <linux/log2.h>
#include <linux/mm.h>
#include <linux/slab.h>

#include "channel.h"

static void free_shared(void *address, unsigned int order)
{
	if (address)
		free_pages((unsigned long)address, order);
}

static void queue_free(struct mr_queue *q)
{
	u32 i;

	for (i = 0; i < MR_MAX_FIFO_CHUNKS; i++)
		free_shared(q->fifo[i], MR_CHUNK_ORDER);
	free_shared(q->slots, MR_CHUNK_ORDER);
	free_shared(q->ring, MR_CHUNK_ORDER);
	free_shared(q->own_state, 0);
	kvfree(q->lent);
	kvfree(q->borrows);
}

static int fifo_alloc(struct mr_queue *q, struct mr_link_queue *shared)
{
	u32 i, chunks = q->fifo_chunks;
	u64 off;

	for (i = 0; i < chunks; i++) {
		q->fifo[i] = mr_alloc_shared(q->peer->ch, MR_CHUNK_ORDER, &off);
		if (!q->fifo[i])
			return -ENOMEM;
		shared->fifo_off[i] = cpu_to_le64(off);
	}
	shared->fifo_chunks = cpu_to_le32(chunks);
	return 0;
}

static int queue_alloc(struct mr_queue *q, struct mr_link_queue *shared)
{
	const struct mr_channel *ch = q->peer->ch;
	u64 state_off, ring_off, slots_off;
	u32 i;

	BUILD_BUG_ON(sizeof(struct mr_entry) * MR_RING_LEN != MR_CHUNK_LEN);
	BUILD_BUG_ON(sizeof(struct mr_slot) * MR_SLOTS != MR_CHUNK_LEN);
	BUILD_BUG_ON(sizeof(struct mr_queue_state) > MR_PAGE_LEN);
	spin_lock_init(&q->lock);
	q->fifo_chunks = rounddown_pow_of_two(clamp(mr_fifo_kb / 64, 2u, MR_MAX_FIFO_CHUNKS + 0u));
	q->own_state = mr_alloc_shared(ch, 0, &state_off);
	q->ring = mr_alloc_shared(ch, MR_CHUNK_ORDER, &ring_off);
	q->slots = mr_alloc_shared(ch, MR_CHUNK_ORDER, &slots_off);
	q->lent = kvcalloc(MR_SLOTS, sizeof(*q->lent), GFP_KERNEL);
	q->borrows = kvcalloc(MR_SLOTS, sizeof(*q->borrows), GFP_KERNEL);
	if (!q->own_state || !q->ring || !q->slots || !q->lent || !q->borrows)
		return -ENOMEM;
	shared->state_off = cpu_to_le64(state_off);
	shared->ring_off = cpu_to_le64(ring_off);
	shared->slots_off = cpu_to_le64(slots_off);
	for (i = 0; i < MR_SLOTS; i++)
		q->free_slots[q->free_len++] = i;
	/* Events lie in the past until one is wanted. */
	q->own_state->taken_event = cpu_to_le32(~0u);
	q->own_state->done_event = cpu_to_le32(~0u);
	return fifo_alloc(q, shared);
}

/* Allocates all memory that the peer will read, and the link's page that says where it is. */
int mr_queues_alloc(struct mr_peer *peer)
{
	u32 i;
	int err;

	BUILD_BUG_ON(sizeof(struct mr_link) > MR_PAGE_LEN);
	peer->queue = kvcalloc(peer->queues, sizeof(*peer->queue), GFP_KERNEL);
	if (!peer->queue)
		return -ENOMEM;
	for (i = 0; i < peer->queues; i++) {
		peer->queue[i].peer = peer;
		peer->queue[i].index = i;
		err = queue_alloc(&peer->queue[i], &peer->own_link->queue[i]);
		if (err)
			return err;
	}
	return 0;
}

void mr_queues_free(struct mr_peer *peer)
{
	u32 i;

	for (i = 0; peer->queue && i < peer->queues; i++)
		queue_free(&peer->queue[i]);
	kvfree(peer->queue);
	peer->queue = NULL;
}

/* Checks the addresses of the peer's ring and takes them over. @shared is a copy. */
static int queue_attach(struct mr_queue *q, const struct mr_link_queue *shared)
{
	u32 i, chunks = le32_to_cpu(shared->fifo_chunks);
	const struct mr_peer *peer = q->peer;

	if (!chunks || chunks > MR_MAX_FIFO_CHUNKS || !is_power_of_2(chunks))
		return -EPROTO;
	q->peer_state = mr_peer_address(peer, le64_to_cpu(shared->state_off), MR_PAGE_LEN,
					MR_PAGE_LEN);
	q->peer_ring = mr_peer_address(peer, le64_to_cpu(shared->ring_off), MR_CHUNK_LEN,
				       MR_PAGE_LEN);
	q->peer_slots = mr_peer_address(peer, le64_to_cpu(shared->slots_off), MR_CHUNK_LEN,
					MR_PAGE_LEN);
	if (!q->peer_state || !q->peer_ring || !q->peer_slots)
		return -EPROTO;
	for (i = 0; i < chunks; i++) {
		q->peer_fifo[i] = mr_peer_address(peer, le64_to_cpu(shared->fifo_off[i]),
						  MR_CHUNK_LEN, MR_PAGE_LEN);
		if (!q->peer_fifo[i])
			return -EPROTO;
	}
	q->peer_fifo_len = chunks * MR_CHUNK_LEN;
	return 0;
}

/* Checks the addresses of all rings of a peer and takes them over. @link is a copy. */
int mr_queues_attach(struct mr_peer *peer, const struct mr_link *link)
{
	u32 i;
	int err;

	if (le32_to_cpu(link->queues) != peer->queues)
		return -EPROTO;
	for (i = 0; i < peer->queues; i++) {
		err = queue_attach(&peer->queue[i], &link->queue[i]);
		if (err)
			return err;
	}
	return 0;
}

/* Whether we have taken all messages of the peer. */
bool mr_queues_are_drained(const struct mr_peer *peer)
{
	u32 i;

	for (i = 0; peer->attached && i < peer->queues; i++) {
		const struct mr_queue *q = &peer->queue[i];

		if (READ_ONCE(q->taken) != mr_read32(&q->peer_state->produced))
			return false;
	}
	return true;
}

/* Takes back the slots that the peer has released. Returns the number that it still has. */
u32 mr_queues_reclaim(struct mr_peer *peer)
{
	u32 i, sum = 0;

	for (i = 0; i < peer->queues; i++) {
		struct mr_queue *q = &peer->queue[i];

		spin_lock_bh(&q->lock);
		mr_queue_reclaim(q);
		spin_unlock_bh(&q->lock);
		/* The peer no longer reads the pages, or must not. */
		if (peer->dead || peer->broken)
			mr_queue_release_all(q);
		sum += mr_queue_count_lent(q);
	}
	return sum;
}

/* Waits for senders that saw the peer open. */
void mr_queues_wait_for_senders(struct mr_peer *peer)
{
	u32 i;

	for (i = 0; i < peer->queues; i++) {
		spin_lock_bh(&peer->queue[i].lock);
		spin_unlock_bh(&peer->queue[i].lock);
	}
}
