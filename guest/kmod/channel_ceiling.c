// SPDX-License-Identifier: GPL-2.0
/*
 * Ceilings: what this member may send in a second, by the host's word.
 *
 * Each ceiling is a bucket that is empty until a time: free_ns. A message may be sent when that has
 * passed, and moves it by what the message costs; after a pause it lies burst_ns in the past at
 * most. So one message at a time may be owed, and none needs to be cut.
 *
 * A message that comes too early finds the ring as if it were full. Its queue waits, and a timer
 * gives one queue after the other its turn: while queues wait, only the one whose turn it is sends,
 * so no queue takes what others wait for. A turn has the bytes of the largest message: TCP makes
 * small messages where it is slow, and would stay slow with one for each turn. Messages without
 * bytes (marks and their answers) are counted and never wait, since held packets of others depend
 * on them.
 *
 * The host believes none of this: it compares what peers received (services/channel).
 */
#include <linux/hrtimer.h>
#include <linux/ktime.h>
#include <linux/math64.h>

#include "channel.h"

/* Least time between two turns: a timer for each message would cost more than the message. */
#define TURN_NS 500000

static u64 next_free_ns(const struct mr_ceiling *c)
{
	return max(c->bytes.free_ns, c->ops.free_ns);
}

/* Caller holds the lock. */
static void start_timer(struct mr_ceiling *c, u64 now)
{
	u64 at = max(next_free_ns(c), now + min_t(u64, TURN_NS, c->burst_ns / 2));

	c->is_waiting = true;
	if (!hrtimer_is_queued(&c->timer))
		hrtimer_start(&c->timer, ns_to_ktime(at), HRTIMER_MODE_ABS_SOFT);
}

/*
 * Whether a queue may send a message of this length now; else its client waits for ->writable().
 * Caller holds the queue's lock.
 */
bool mr_ceiling_may_send(struct mr_queue *q, const struct mr_tx *tx)
{
	struct mr_ceiling *c = &q->peer->ch->ceiling;
	u64 now = ktime_get_ns();
	bool may_send;

	if (!tx->len)
		return true;
	spin_lock(&c->lock);
	may_send = (!c->is_waiting || c->turn == q) && now >= next_free_ns(c);
	if (!may_send) {
		WRITE_ONCE(q->held_clients, q->held_clients | BIT(tx->client));
		q->stats.held++;
		start_timer(c, now);
	}
	spin_unlock(&c->lock);
	return may_send;
}

static void take(struct mr_bucket *bucket, u64 cost, u64 now, u64 burst_ns)
{
	u64 earliest = now > burst_ns ? now - burst_ns : 0;

	if (!bucket->rate)
		return;
	bucket->free_ns = max(bucket->free_ns, earliest);
	/* At most 65,920 bytes, and a rest below the rate. */
	bucket->free_ns += div64_u64_rem(cost * NSEC_PER_SEC + bucket->rest, bucket->rate,
					 &bucket->rest);
}

/* Charges a message that was sent. Caller holds the queue's lock. */
void mr_ceiling_charge(struct mr_queue *q, u32 len)
{
	struct mr_ceiling *c = &q->peer->ch->ceiling;
	u32 cost = max_t(u32, len, MR_MIN_CHARGE_LEN);
	u64 now = ktime_get_ns();

	spin_lock(&c->lock);
	if (c->turn == q)
		c->turn_left -= min(cost, c->turn_left);
	take(&c->bytes, cost, now, c->burst_ns);
	take(&c->ops, 1, now, c->burst_ns);
	spin_unlock(&c->lock);
}

static bool is_held(struct mr_queue *q)
{
	return READ_ONCE(q->held_clients) && READ_ONCE(q->peer->open);
}

/*
 * The next queue that waits: the one whose turn it is, if it has some left, or one behind it. In an
 * RCU read section.
 */
static struct mr_queue *find_held(struct mr_channel *ch)
{
	struct mr_ceiling *c = &ch->ceiling;
	u32 i, end = MR_MAX_MEMBERS * MR_MAX_QUEUES, first = c->turn_at + !c->turn_left;

	for (i = 0; i < end; i++) {
		u32 at = (first + i) % end, index = at % MR_MAX_QUEUES;
		struct mr_peer *peer = rcu_dereference(ch->peers[at / MR_MAX_QUEUES]);

		if (!peer || index >= peer->queues || !is_held(&peer->queue[index]))
			continue;
		if (at != c->turn_at || !c->turn_left)
			c->turn_left = MR_MAX_MESSAGE_LEN;
		c->turn_at = at;
		return &peer->queue[index];
	}
	return NULL;
}

static u32 take_held_clients(struct mr_queue *q)
{
	u32 held;

	spin_lock(&q->lock);
	held = q->held_clients;
	WRITE_ONCE(q->held_clients, 0);
	spin_unlock(&q->lock);
	return held;
}

/* Gives the next queue its turn. Softirq. */
static enum hrtimer_restart give_turn(struct hrtimer *timer)
{
	struct mr_channel *ch = container_of(timer, struct mr_channel, ceiling.timer);
	struct mr_ceiling *c = &ch->ceiling;
	struct mr_queue *q;

	rcu_read_lock();
	spin_lock(&c->lock);
	/* Whoever begins to wait behind this look takes the lock later, and starts the timer. */
	q = find_held(ch);
	c->turn = q;
	c->is_waiting = !!q;
	spin_unlock(&c->lock);
	if (q) {
		mr_clients_writable(q->peer, q->index, take_held_clients(q));
		spin_lock(&c->lock);
		start_timer(c, ktime_get_ns());
		spin_unlock(&c->lock);
	}
	rcu_read_unlock();
	return HRTIMER_NORESTART;
}

static void set_rate(struct mr_bucket *bucket, u64 rate)
{
	bucket->rate = rate;
	bucket->free_ns = 0;
	bucket->rest = 0;
}

/* Takes over the host's ceilings. What is owed of other ones is forgotten. */
void mr_ceiling_set(struct mr_channel *ch, const struct mr_host *h)
{
	struct mr_ceiling *c = &ch->ceiling;
	u64 bytes = le64_to_cpu(h->ceiling_bytes_per_s), ops = le64_to_cpu(h->ceiling_ops_per_s);
	u64 burst_ns = (u64)le32_to_cpu(h->ceiling_burst_ms) * NSEC_PER_MSEC;

	spin_lock_bh(&c->lock);
	if (bytes != c->bytes.rate || ops != c->ops.rate || burst_ns != c->burst_ns) {
		set_rate(&c->bytes, bytes);
		set_rate(&c->ops, ops);
		c->burst_ns = burst_ns;
		WRITE_ONCE(c->is_set, bytes || ops);
		/* The timer may be set to when the old ones would have been free. */
		hrtimer_try_to_cancel(&c->timer);
		start_timer(c, ktime_get_ns());
	}
	spin_unlock_bh(&c->lock);
}

void mr_ceiling_init(struct mr_channel *ch)
{
	spin_lock_init(&ch->ceiling.lock);
	hrtimer_init(&ch->ceiling.timer, CLOCK_MONOTONIC, HRTIMER_MODE_ABS_SOFT);
	ch->ceiling.timer.function = give_turn;
}

/* Nobody sends any more. */
void mr_ceiling_exit(struct mr_channel *ch)
{
	hrtimer_cancel(&ch->ceiling.timer);
}
