// SPDX-License-Identifier: GPL-2.0
/*
 * /sys/kernel/debug/millrace/channel: one line per member, link and queue, as `key value` pairs.
 */
#include <linux/debugfs.h>
#include <linux/seq_file.h>

#include "channel.h"

static struct dentry *debugfs_dir;

static const char *state_name(u32 state)
{
	static const char *const names[] = { "none", "opening", "up", "draining", "closed" };

	return state < ARRAY_SIZE(names) ? names[state] : "?";
}

static void show_queue(struct seq_file *m, struct mr_queue *q)
{
	const struct mr_queue_stats *s = &q->stats;

	seq_printf(m, "queue %u peer %u sent %llu sent_bytes %llu", q->index, q->peer->id, s->sent,
		   s->sent_bytes);
	seq_printf(m, " referred %llu referred_bytes %llu", s->referred, s->referred_bytes);
	seq_printf(m, " received %llu received_bytes %llu borrowed %llu busy_pages %llu",
		   s->received, s->received_bytes, s->borrowed, s->busy_pages);
	seq_printf(m, " full %llu held %llu kicks %llu no_client %llu lent %u\n", s->full, s->held,
		   s->kicks, s->no_client, mr_queue_count_lent(q));
}

/* Positions of the indices, for debugging a lost message. */
static void show_indices(struct seq_file *m, struct mr_queue *q)
{
	const struct mr_queue_state *own_state = q->own_state, *peer_state = q->peer_state;

	if (!peer_state)
		return;
	seq_printf(m, "index %u peer %u produced %u taken_event %u taken %u", q->index, q->peer->id,
		   mr_read32(&own_state->produced), mr_read32(&own_state->taken_event),
		   mr_read32(&own_state->taken));
	seq_printf(m, " produced_event %u done %u their_produced %u their_taken_event %u",
		   mr_read32(&own_state->produced_event), mr_read32(&own_state->done),
		   mr_read32(&peer_state->produced), mr_read32(&peer_state->taken_event));
	seq_printf(m, " their_taken %u their_produced_event %u their_done %u\n",
		   mr_read32(&peer_state->taken), mr_read32(&peer_state->produced_event),
		   mr_read32(&peer_state->done));
}

static void show_peer(struct seq_file *m, struct mr_peer *peer)
{
	u32 i;

	seq_printf(m, "peer %u index %u name %s state %s open %d broken %d dead %d borrowed %ld",
		   peer->id, peer->index, peer->name, state_name(peer->state), peer->open,
		   peer->broken, peer->dead, READ_ONCE(peer->borrowed));
	seq_printf(m, " refused %lld\n", atomic64_read(&peer->refused));
	for (i = 0; i < peer->queues; i++) {
		show_queue(m, &peer->queue[i]);
		show_indices(m, &peer->queue[i]);
	}
}

/* Pages of the plugged memory that have users, counted one by one. */
static unsigned long pages_in_use(const struct mr_memory *memory)
{
	unsigned long i, count = 0;

	for (i = 0; memory->mapped && i < memory->len >> PAGE_SHIFT; i++) {
		struct page *page = virt_to_page(memory->base + (i << PAGE_SHIFT));

		count += page_count(page) != 1 || page->zone_device_data;
	}
	return count;
}

static void show_vector(struct seq_file *m, const struct mr_vector *v)
{
	seq_printf(m, "vector %u interrupts %llu polls %llu poll_hits %llu poll_misses %llu",
		   v->index, v->interrupts, v->polls, v->poll_hits, v->poll_misses);
	seq_printf(m, " polled_us %llu window_us %llu\n", div_u64(v->polled_ns, 1000),
		   div_u64(v->window_ns, 1000));
}

static void show_member(struct seq_file *m, const struct mr_channel *ch)
{
	seq_printf(m, "member %u index %u queues %u window_len %llu leaving %d doorbell_us %llu\n",
		   ch->id, ch->own_index, ch->queues, ch->window_len, ch->leaving,
		   div_u64(ch->doorbell_ns, 1000));
}

static void show_ceiling(struct seq_file *m, const struct mr_ceiling *c)
{
	seq_printf(m, "ceiling bytes_per_s %llu ops_per_s %llu burst_ms %llu\n", c->bytes.rate,
		   c->ops.rate, div_u64(c->burst_ns, NSEC_PER_MSEC));
}

static int channel_show(struct seq_file *m, void *unused)
{
	struct mr_memory *memory;
	u32 i;

	mutex_lock(&mr_lock);
	for (i = 0; mr_channel && i < mr_channel->queues; i++)
		show_vector(m, &mr_channel->vector[i]);
	if (mr_channel) {
		show_member(m, mr_channel);
		show_ceiling(m, &mr_channel->ceiling);
	}
	list_for_each_entry(memory, &mr_memories, list)
		seq_printf(m, "memory slot %u mapped %d len %llu in_use %lu\n", memory->slot,
			   memory->mapped, memory->len, pages_in_use(memory));
	for (i = 0; mr_channel && i < MR_MAX_MEMBERS; i++) {
		struct mr_peer *peer = rcu_dereference_protected(mr_channel->peers[i],
								 lockdep_is_held(&mr_lock));

		if (peer)
			show_peer(m, peer);
	}
	mutex_unlock(&mr_lock);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(channel);

void mr_debugfs_init(void)
{
	debugfs_dir = debugfs_create_dir("millrace", NULL);
	debugfs_create_file("channel", 0400, debugfs_dir, NULL, &channel_fops);
}

void mr_debugfs_exit(void)
{
	debugfs_remove_recursive(debugfs_dir);
}
