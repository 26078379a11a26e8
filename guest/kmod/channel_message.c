// SPDX-License-Identifier: GPL-2.0
/*
 * Access of a client to a message that is being received (checked by channel_rx.c): its sender, its
 * bytes, and the sender's pages.
 */
#include <linux/mm.h>
#include <linux/module.h>

#include "channel.h"

struct mr_peer *mr_rx_peer(const struct mr_rx *rx)
{
	return rx->queue->peer;
}
EXPORT_SYMBOL_GPL(mr_rx_peer);

unsigned int mr_rx_queue(const struct mr_rx *rx)
{
	return rx->queue->index;
}
EXPORT_SYMBOL_GPL(mr_rx_queue);

struct napi_struct *mr_rx_napi(const struct mr_rx *rx)
{
	return rx->napi;
}
EXPORT_SYMBOL_GPL(mr_rx_napi);

const void *mr_rx_meta(const struct mr_rx *rx)
{
	return rx->entry.meta;
}
EXPORT_SYMBOL_GPL(mr_rx_meta);

void mr_rx_pause(struct mr_rx *rx)
{
	rx->paused = true;
}
EXPORT_SYMBOL_GPL(mr_rx_pause);

u32 mr_rx_len(const struct mr_rx *rx)
{
	return rx->len;
}
EXPORT_SYMBOL_GPL(mr_rx_len);

u32 mr_rx_head_len(const struct mr_rx *rx)
{
	return rx->head_len;
}
EXPORT_SYMBOL_GPL(mr_rx_head_len);

u32 mr_rx_segs(const struct mr_rx *rx)
{
	return rx->segs_len;
}
EXPORT_SYMBOL_GPL(mr_rx_segs);

static void copy_from_fifo(const struct mr_rx *rx, u32 off, void *to, u32 len)
{
	const struct mr_queue *q = rx->queue;
	u32 pos = le32_to_cpu(rx->entry.fifo_pos) + off;

	while (len) {
		u32 fifo_off = pos % q->peer_fifo_len, chunk_off = fifo_off % MR_CHUNK_LEN;
		u32 part = min_t(u32, len, MR_CHUNK_LEN - chunk_off);

		memcpy(to, q->peer_fifo[fifo_off / MR_CHUNK_LEN] + chunk_off, part);
		pos += part;
		to += part;
		len -= part;
	}
}

void mr_rx_copy(const struct mr_rx *rx, u32 off, void *to, u32 len)
{
	u32 i, part;

	if (!rx->segs_len) {
		copy_from_fifo(rx, off, to, len);
		return;
	}
	if (off < rx->head_len) {
		part = min(len, rx->head_len - off);
		memcpy(to, rx->head + off, part);
		to += part;
		len -= part;
		off = rx->head_len;
	}
	off -= rx->head_len;
	for (i = 0; len && i < rx->segs_len; i++) {
		if (off >= rx->segs[i].len) {
			off -= rx->segs[i].len;
			continue;
		}
		part = min(len, rx->segs[i].len - off);
		memcpy(to, rx->queue->peer->memory->base + rx->segs[i].off + off, part);
		to += part;
		len -= part;
		off = 0;
	}
}
EXPORT_SYMBOL_GPL(mr_rx_copy);

unsigned int mr_rx_borrow(struct mr_rx *rx, struct mr_sg sg[MR_MAX_SEGS])
{
	struct mr_memory *memory = rx->queue->peer->memory;
	struct page *pages[MR_MAX_SEGS];
	u32 i;

	if (!rx->segs_len || rx->borrowed)
		return 0;
	for (i = 0; i < rx->segs_len; i++) {
		pages[i] = virt_to_page(memory->base + rx->segs[i].off);
		sg[i].page = pages[i];
		sg[i].off = rx->segs[i].off % PAGE_SIZE;
		sg[i].len = rx->segs[i].len;
	}
	rx->borrowed = true;
	if (!mr_borrow_pages(rx->queue, rx->slot, pages, rx->segs_len)) {
		rx->queue->stats.busy_pages++;
		return 0;
	}
	rx->queue->stats.borrowed++;
	return rx->segs_len;
}
EXPORT_SYMBOL_GPL(mr_rx_borrow);
