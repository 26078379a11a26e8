// SPDX-License-Identifier: GPL-2.0
/*
 * Receiving: one NAPI context per vector, which empties the ring of its number of every peer.
 *
 * All data of a peer is copied once, then checked, then used. A wrong entry ends the link
 * (mr_peer_break()): no correct peer sends one, and the entries after it cannot be trusted.
 */
#include <linux/interrupt.h>
#include <linux/ktime.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/version.h>

#include "channel.h"

/* Entries after which `taken` is published, and the sender's FIFO gets room. */
#define BATCH 16

static bool check_reference(struct mr_rx *rx)
{
	struct mr_queue *q = rx->queue;
	const struct mr_slot *slot = &q->peer_slots[rx->slot];
	u32 i, len;

	rx->head_len = mr_read32(&slot->head_len);
	rx->segs_len = mr_read32(&slot->segs_len);
	if (rx->head_len > MR_MAX_HEAD_LEN || !rx->segs_len || rx->segs_len > MR_MAX_SEGS)
		return false;
	memcpy(rx->head, slot->head, rx->head_len);
	len = rx->head_len;
	for (i = 0; i < rx->segs_len; i++) {
		u64 off = mr_read64(&slot->segs[i].off);
		u32 part = mr_read32(&slot->segs[i].len);

		if (!part || part > PAGE_SIZE - off % PAGE_SIZE || off >= q->peer->window_len)
			return false;
		rx->segs[i].off = off;
		rx->segs[i].len = part;
		len += part;
	}
	return len == rx->len;
}

static bool check_entry(struct mr_rx *rx)
{
	struct mr_queue *q = rx->queue;

	rx->len = le32_to_cpu(rx->entry.len);
	rx->borrowed = false;
	if (rx->len > MR_MAX_MESSAGE_LEN || rx->entry.client > MR_MAX_CLIENT)
		return false;
	switch (rx->entry.kind) {
	case MR_KIND_COPY:
		rx->head_len = rx->len;
		rx->segs_len = 0;
		return rx->len <= q->peer_fifo_len;
	case MR_KIND_REFERENCE:
		rx->slot = le16_to_cpu(rx->entry.slot);
		return rx->slot < MR_SLOTS && check_reference(rx);
	default:
		return false;
	}
}

/* Receives one entry. False: the link is broken. */
static bool receive_one(struct mr_queue *q, struct mr_rx *rx)
{
	memcpy(&rx->entry, &q->peer_ring[q->taken % MR_RING_LEN], sizeof(rx->entry));
	rx->queue = q;
	if (!check_entry(rx)) {
		mr_peer_break(q->peer, "sent a wrong entry", rx->entry.kind);
		return false;
	}
	if (rx->segs_len && !mr_borrow_begin(q, rx->slot)) {
		mr_peer_break(q->peer, "sent a slot that it had not got back", rx->slot);
		return false;
	}
	q->stats.received++;
	q->stats.received_bytes += rx->len;
	mr_client_receive(rx);
	if (rx->segs_len)
		mr_borrow_end(q, rx->slot);
	return true;
}

/* Tells the peer which entries were taken. */
static void publish_taken(struct mr_queue *q, u32 old)
{
	if (q->taken == old)
		return;
	/* Our reads of FIFO and slot are over before the peer may write there. */
	mr_publish32(&q->own_state->taken, q->taken);
	/* Orders the index before the event: see wait_for_room(). */
	virt_mb();
	if (mr_has_passed(mr_read32(&q->peer_state->taken_event), q->taken, old))
		mr_ring(q->peer->ch, q->peer->id, 1 + q->index);
}

static bool is_attached(const struct mr_peer *peer)
{
	u32 state = READ_ONCE(peer->state);

	/* Pairs with try_attach(): orders the addresses of the rings first. */
	return smp_load_acquire(&peer->attached) && !READ_ONCE(peer->broken) &&
	       (state == MR_LINK_UP || state == MR_LINK_DRAINING);
}

static u32 count_entries(const struct mr_queue *q)
{
	return mr_observe32(&q->peer_state->produced) - q->taken;
}

static int receive(struct mr_queue *q, struct mr_rx *rx, int budget)
{
	u32 count = count_entries(q), old = q->taken;
	int done = 0;

	if (count > MR_RING_LEN) {
		mr_peer_break(q->peer, "has more entries than the ring", count);
		return 0;
	}
	while (done < budget && count && !rx->paused) {
		if (!receive_one(q, rx))
			break;
		q->taken++;
		done++;
		count--;
		if (q->taken - old == BATCH) {
			publish_taken(q, old);
			old = q->taken;
		}
	}
	publish_taken(q, old);
	return done;
}

/* Returns the clients that may send again: those that wait, once half of the ring is free. */
static u32 take_waiting_clients(struct mr_queue *q)
{
	u32 waiting = q->waiting_clients;

	if (!waiting)
		return 0;
	/* The requested doorbell comes once: where that is too little room, request another. */
	while (q->produced - q->taken_seen > MR_RING_LEN / 2) {
		if (mr_queue_request_doorbell(q))
			return 0;
	}
	WRITE_ONCE(q->waiting_clients, 0);
	return waiting;
}

/* Reclaims for our own sending side: entries taken, slots released, room for waiting clients. */
static void reclaim(struct mr_queue *q)
{
	u32 waiting;

	/* The lock's holder checks for taken entries itself, but wakes no client. */
	if (!spin_trylock(&q->lock)) {
		if (!READ_ONCE(q->waiting_clients))
			return;
		spin_lock(&q->lock);
	}
	mr_queue_reclaim(q);
	waiting = take_waiting_clients(q);
	spin_unlock(&q->lock);
	if (waiting)
		mr_clients_writable(q->peer, q->index, waiting);
}

static int receive_all(struct mr_vector *v, int budget, bool *paused)
{
	unsigned int i, index;
	int done = 0;
	struct mr_rx rx;

	rx.napi = &v->napi;
	rx.paused = false;
	for (i = 0; i < MR_MAX_MEMBERS; i++) {
		struct mr_peer *peer;

		index = (v->first_peer + i) % MR_MAX_MEMBERS;
		peer = rcu_dereference(v->ch->peers[index]);
		if (!peer || !is_attached(peer))
			continue;
		if (done < budget && !rx.paused)
			done += receive(&peer->queue[v->index], &rx, budget - done);
		reclaim(&peer->queue[v->index]);
		WRITE_ONCE(peer->queue[v->index].own_state->want_copies,
			   cpu_to_le32(READ_ONCE(peer->borrowed) > MR_MAX_BORROWED));
	}
	/* Another peer has the first turn in the next round. */
	v->first_peer = (v->first_peer + 1) % MR_MAX_MEMBERS;
	mr_clients_received(v->index);
	*paused = rx.paused;
	return done;
}

static struct mr_queue *attached_queue(struct mr_vector *v, unsigned int index)
{
	struct mr_peer *peer = rcu_dereference(v->ch->peers[index]);

	return peer && is_attached(peer) ? &peer->queue[v->index] : NULL;
}

/*
 * Requests a doorbell for the next entry. The poller and NAPI may both do so at once, one of them
 * with an old index. The one that sees that its index was old requests again; one that takes more
 * entries after that check makes a request of its own.
 */
static void request_doorbell(struct mr_queue *q)
{
	u32 taken;

	do {
		taken = READ_ONCE(q->taken);
		WRITE_ONCE(q->own_state->produced_event, cpu_to_le32(taken));
		/* Orders the event before the indices: see publish() in channel_tx.c. */
		virt_mb();
	} while (taken != READ_ONCE(q->taken));
}

/* Requests a doorbell of each peer. True: messages came meanwhile. */
bool mr_vector_rearm(struct mr_vector *v)
{
	bool more = false;
	unsigned int i;

	rcu_read_lock();
	for (i = 0; i < MR_MAX_MEMBERS; i++) {
		struct mr_queue *q = attached_queue(v, i);

		if (!q)
			continue;
		request_doorbell(q);
		more |= count_entries(q) != 0;
	}
	rcu_read_unlock();
	return more;
}

/* Requests no doorbell of any peer: the event lies in the past. */
void mr_vector_disarm(struct mr_vector *v)
{
	unsigned int i;

	rcu_read_lock();
	for (i = 0; i < MR_MAX_MEMBERS; i++) {
		struct mr_queue *q = attached_queue(v, i);

		if (q)
			WRITE_ONCE(q->own_state->produced_event, cpu_to_le32(q->taken - 1));
	}
	rcu_read_unlock();
}

bool mr_vector_has_entries(struct mr_vector *v)
{
	bool has_entries = false;
	unsigned int i;

	rcu_read_lock();
	for (i = 0; !has_entries && i < MR_MAX_MEMBERS; i++) {
		struct mr_queue *q = attached_queue(v, i);

		has_entries = q && count_entries(q);
	}
	rcu_read_unlock();
	return has_entries;
}

static int vector_poll(struct napi_struct *napi, int budget)
{
	struct mr_vector *v = container_of(napi, struct mr_vector, napi);
	bool more = false, paused;
	int done;

	v->polls++;
	WRITE_ONCE(v->paused, false);
	rcu_read_lock();
	/* netpoll has budget 0: it sends only. */
	done = receive_all(v, budget, &paused);
	rcu_read_unlock();
	if (paused && mr_poll_pause(v)) {
		done = min(done, budget - 1);
		napi_complete_done(napi, done);
		return done;
	}
	if (done == budget || !napi_complete_done(napi, done))
		return done;
	/* While the thread watches the rings, no doorbell is wanted. */
	if (done ? !mr_poll_continue(v) : !READ_ONCE(v->is_watching))
		more = mr_vector_rearm(v);
	if (more)
		napi_schedule(napi);
	return done;
}

static irqreturn_t vector_interrupt(int irq, void *data)
{
	struct mr_vector *v = data;

	v->interrupts++;
	if (!v->index)
		mr_poll_handle_doorbell(v->ch);
	napi_schedule_irqoff(&v->napi);
	return IRQ_HANDLED;
}

static irqreturn_t control_interrupt(int irq, void *data)
{
	struct mr_channel *ch = data;

	queue_work(ch->work, &ch->control);
	return IRQ_HANDLED;
}

static struct net_device *alloc_napi_device(void)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 10, 0)
	return alloc_netdev_dummy(0);
#else
	struct net_device *dev = kzalloc(sizeof(*dev), GFP_KERNEL);

	if (dev)
		init_dummy_netdev(dev);
	return dev;
#endif
}

static void free_napi_device(struct net_device *dev)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 10, 0)
	free_netdev(dev);
#else
	kfree(dev);
#endif
}

static int request_vectors(struct mr_channel *ch)
{
	u32 i;
	int err = request_irq(pci_irq_vector(ch->pdev, 0), control_interrupt, 0,
			      "millrace-control", ch);

	for (i = 0; !err && i < ch->queues; i++) {
		err = request_irq(pci_irq_vector(ch->pdev, 1 + i), vector_interrupt, 0,
				  "millrace-queue", &ch->vector[i]);
		if (err) {
			while (i--)
				free_irq(pci_irq_vector(ch->pdev, 1 + i), &ch->vector[i]);
			free_irq(pci_irq_vector(ch->pdev, 0), ch);
		}
	}
	return err;
}

int mr_vectors_start(struct mr_channel *ch)
{
	u32 i;
	int err;

	ch->vector = kcalloc(ch->queues, sizeof(*ch->vector), GFP_KERNEL);
	ch->napi_dev = alloc_napi_device();
	if (!ch->vector || !ch->napi_dev) {
		err = -ENOMEM;
		goto free;
	}
	for (i = 0; i < ch->queues; i++) {
		ch->vector[i].ch = ch;
		ch->vector[i].index = i;
		netif_napi_add(ch->napi_dev, &ch->vector[i].napi, vector_poll);
		napi_enable(&ch->vector[i].napi);
		mr_poll_start(&ch->vector[i]);
	}
	err = request_vectors(ch);
	if (!err)
		return 0;
	for (i = 0; i < ch->queues; i++) {
		napi_disable(&ch->vector[i].napi);
		mr_poll_stop(&ch->vector[i]);
		netif_napi_del(&ch->vector[i].napi);
	}
free:
	kfree(ch->vector);
	ch->vector = NULL;
	if (ch->napi_dev)
		free_napi_device(ch->napi_dev);
	return err;
}

void mr_vectors_stop(struct mr_channel *ch)
{
	u32 i;

	for (i = 0; i < ch->queues; i++)
		free_irq(pci_irq_vector(ch->pdev, 1 + i), &ch->vector[i]);
	free_irq(pci_irq_vector(ch->pdev, 0), ch);
	for (i = 0; i < ch->queues; i++) {
		napi_disable(&ch->vector[i].napi);
		mr_poll_stop(&ch->vector[i]);
		netif_napi_del(&ch->vector[i].napi);
	}
	/* netif_napi_del() does not wait for readers. */
	synchronize_net();
	free_napi_device(ch->napi_dev);
	kfree(ch->vector);
	ch->vector = NULL;
}

/* Makes a vector check its rings once, with or without a doorbell. */
void mr_vector_kick(struct mr_vector *v)
{
	local_bh_disable();
	napi_schedule(&v->napi);
	local_bh_enable();
}

void mr_vectors_kick(struct mr_channel *ch)
{
	u32 i;

	for (i = 0; i < ch->queues; i++)
		mr_vector_kick(&ch->vector[i]);
}
