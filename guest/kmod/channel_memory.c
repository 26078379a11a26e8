// SPDX-License-Identifier: GPL-2.0
/*
 * Memory that is shared: own pages by their offset in the memory file, and a peer's memory as
 * pages of a device.
 *
 * A page of a peer's memory has reference count 1 while nobody uses it, and that one belongs to
 * its first user; see free_zone_device_page(). The kernel calls page_free() with the last
 * reference, whoever held it: a socket's queue, a pipe, a block request. zone_device_data is the
 * list of the messages that the page is part of.
 */
#include <linux/gfp.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/smp.h>

#include "channel.h"

static atomic_t peers_in_use = ATOMIC_INIT(0); /* peers with pages in use here */

/* Finds the offset of a physical range in the own memory file. -ERANGE: peers cannot see it. */
int mr_own_offset(const struct mr_channel *ch, phys_addr_t gpa, u64 len, u64 *off)
{
	u32 i;

	for (i = 0; i < ch->regions_len; i++) {
		u64 start = le64_to_cpu(ch->regions[i].gpa);
		u64 size = le64_to_cpu(ch->regions[i].len);

		if (gpa < start || gpa - start >= size || size - (gpa - start) < len)
			continue;
		*off = le64_to_cpu(ch->regions[i].off) + (gpa - start);
		return *off + len <= ch->window_len ? 0 : -ERANGE;
	}
	return -ERANGE;
}

/* Allocates zeroed pages that peers can see. */
void *mr_alloc_shared(const struct mr_channel *ch, unsigned int order, u64 *off)
{
	static const gfp_t zones[] = { 0, GFP_DMA32 };
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(zones); i++) {
		gfp_t gfp = GFP_KERNEL | __GFP_ZERO | __GFP_NOWARN | __GFP_NORETRY | zones[i];
		struct page *page = alloc_pages(gfp, order);

		if (!page)
			continue;
		if (!mr_own_offset(ch, page_to_phys(page), PAGE_SIZE << order, off))
			return page_address(page);
		__free_pages(page, order);
	}
	return NULL;
}

/* Ends one use of a page; the last one of a message returns its slot. */
static void end_use(struct mr_queue *q, u16 slot)
{
	struct mr_borrow *borrow = &q->borrows[slot];
	u32 old = q->done;

	lockdep_assert_held(&q->peer->borrow_lock);
	if (--borrow->pending)
		return;
	q->own_state->done_slots[old % MR_DONE_LEN] = cpu_to_le16(slot);
	q->done = old + 1;
	/* Makes the entry visible before the index. */
	mr_publish32(&q->own_state->done, old + 1);
	/* Orders the index before its event: see mr_queue_reclaim(). */
	virt_mb();
	if (mr_has_passed(mr_read32(&q->peer_state->done_event), old + 1, old))
		mr_ring(q->peer->ch, q->peer->id, 1 + q->index);
}

static void add_borrowed(struct mr_peer *peer, long count)
{
	long old = peer->borrowed;

	/* No unloading while a page of a peer has a user: its release calls us. */
	if (!old && count > 0) {
		__module_get(THIS_MODULE);
		atomic_inc(&peers_in_use);
	}
	WRITE_ONCE(peer->borrowed, old + count);
	if (old && !(old + count)) {
		atomic_dec(&peers_in_use);
		module_put(THIS_MODULE);
	}
}

static void page_free(struct page *page)
{
	struct mr_memory *memory = container_of(page->pgmap, struct mr_memory, pgmap);
	struct mr_peer *peer = memory->peer;
	struct mr_use *use, *next;
	unsigned long flags;
	long count = 0;

	spin_lock_irqsave(&peer->borrow_lock, flags);
	use = page->zone_device_data;
	page->zone_device_data = NULL;
	for (; use; use = next) {
		next = use->next;
		end_use(use->queue, use->slot);
		count++;
	}
	add_borrowed(peer, -count);
	spin_unlock_irqrestore(&peer->borrow_lock, flags);
}

static const struct dev_pagemap_ops pagemap_ops = { .page_free = page_free };

bool mr_is_peer_page(const struct page *page)
{
	return is_zone_device_page(page) && page->pgmap->ops == &pagemap_ops;
}

bool mr_peer_pages_are_in_use(void)
{
	return atomic_read(&peers_in_use);
}

/* Adds a use of a page. False: the page is just being released, which waits for this lock. */
static bool take_page(struct page *page, struct mr_use *use)
{
	struct mr_use *head = page->zone_device_data;

	if (!head) {
		if (page_count(page) != 1)
			return false;
	} else if (!get_page_unless_zero(page)) {
		return false;
	}
	use->next = head;
	page->zone_device_data = use;
	return true;
}

/* Takes all pages of a message or none. */
bool mr_borrow_pages(struct mr_queue *q, u16 slot, struct page **pages, unsigned int count)
{
	struct mr_borrow *borrow = &q->borrows[slot];
	struct mr_peer *peer = q->peer;
	unsigned long flags;
	unsigned int i;

	spin_lock_irqsave(&peer->borrow_lock, flags);
	for (i = 0; i < count; i++) {
		borrow->uses[i].queue = q;
		borrow->uses[i].slot = slot;
		if (!take_page(pages[i], &borrow->uses[i]))
			break;
		borrow->pending++;
	}
	add_borrowed(peer, i);
	spin_unlock_irqrestore(&peer->borrow_lock, flags);
	if (i == count)
		return true;
	while (i)
		put_page(pages[--i]);
	return false;
}

/* Begins to borrow the pages of a slot. False: the peer reuses a slot that it has not got back. */
bool mr_borrow_begin(struct mr_queue *q, u16 slot)
{
	unsigned long flags;
	bool was_free;

	spin_lock_irqsave(&q->peer->borrow_lock, flags);
	was_free = !q->borrows[slot].pending;
	if (was_free)
		q->borrows[slot].pending = 1;
	spin_unlock_irqrestore(&q->peer->borrow_lock, flags);
	return was_free;
}

void mr_borrow_end(struct mr_queue *q, u16 slot)
{
	unsigned long flags;

	spin_lock_irqsave(&q->peer->borrow_lock, flags);
	end_use(q, slot);
	spin_unlock_irqrestore(&q->peer->borrow_lock, flags);
}

static int flush_this_cpu(void *vector)
{
	mr_vector_kick(vector);
	return 0;
}

/*
 * Packets that a program has read are freed on the CPU that received them, at its next receive
 * (skb_attempt_defer_free()). A CPU that receives no more would never free them; so a packet is
 * sent to it. Sleeps.
 */
void mr_pages_flush(struct mr_channel *ch)
{
	unsigned int cpu;

	for_each_online_cpu(cpu)
		smp_call_on_cpu(cpu, flush_this_cpu, &ch->vector[cpu % ch->queues], false);
}

int mr_memory_map(struct mr_memory *memory, struct mr_peer *peer)
{
	struct resource *bar = &memory->pdev->resource[2];
	void *base;

	memset(&memory->pgmap, 0, sizeof(memory->pgmap));
	memory->pgmap.type = MEMORY_DEVICE_GENERIC;
	memory->pgmap.ops = &pagemap_ops;
	memory->pgmap.range.start = bar->start;
	memory->pgmap.range.end = bar->end;
	memory->pgmap.nr_range = 1;
	base = memremap_pages(&memory->pgmap, NUMA_NO_NODE);
	if (IS_ERR(base))
		return PTR_ERR(base);
	memory->base = base;
	memory->len = resource_size(bar);
	memory->peer = peer;
	memory->mapped = true;
	return 0;
}

/* The context that drops the last reference sets the count to 1 after page_free(). */
static void wait_for_counts(const struct mr_memory *memory)
{
	const struct page *page = virt_to_page(memory->base);
	u64 i, pages = memory->len >> PAGE_SHIFT;

	for (i = 0; i < pages; i++) {
		while (page_count(page + i) != 1)
			schedule_timeout_idle(1);
		if (i % 65536 == 0)
			cond_resched();
	}
}

/*
 * Unmaps a peer's memory. None of its pages may be in use: memunmap_pages() does not wait for them.
 * Sleeps.
 */
void mr_memory_unmap(struct mr_memory *memory)
{
	WARN_ON(memory->peer && memory->peer->borrowed);
	if (memory->mapped) {
		wait_for_counts(memory);
		memunmap_pages(&memory->pgmap);
	}
	memory->mapped = false;
	memory->base = NULL;
	memory->peer = NULL;
}

/* Returns an address in the peer's memory; NULL: the range is not inside it, or not aligned. */
const void *mr_peer_address(const struct mr_peer *peer, u64 off, u64 len, u64 align)
{
	if (off >= peer->window_len || peer->window_len - off < len || off & (align - 1))
		return NULL;
	return peer->memory->base + off;
}
