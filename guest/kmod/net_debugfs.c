// SPDX-License-Identifier: GPL-2.0
/*
 * /sys/kernel/debug/millrace_net: counters of packets to members by reason, and their destinations.
 */
#include <linux/debugfs.h>
#include <linux/seq_file.h>

#include "net.h"

static struct dentry *file;

static const char *const reason_names[MR_REASONS] = {
	[MR_TAKEN] = "taken",
	[MR_HELD] = "held",
	[MR_WAITED] = "waited",
	[MR_NOT_CONFIRMED] = "not_confirmed",
	[MR_PROTOCOL] = "protocol",
	[MR_ROUTE] = "route",
	[MR_SOURCE] = "source",
	[MR_EGRESS] = "egress",
	[MR_EXCLUDED] = "excluded",
	[MR_SHAPE] = "shape",
	[MR_REROUTED] = "rerouted",
	[MR_OVERFLOW] = "overflow",
	[MR_DENIED] = "denied",
	[MR_LINK_DOWN] = "link_down",
	[MR_RX] = "rx",
	[MR_RX_BORROWED] = "rx_borrowed",
	[MR_RX_BAD] = "rx_bad",
	[MR_RX_MEMORY] = "rx_memory",
};

const char *mr_reason_name(unsigned int reason)
{
	return reason_names[reason];
}

u64 mr_count_sum(unsigned int reason)
{
	unsigned int cpu;
	u64 sum = 0;

	for_each_possible_cpu(cpu)
		sum += per_cpu(mr_net_counts, cpu)[reason];
	return sum;
}

static const char *const path_names[] = { "ordinary", "to_channel", "channel", "to_ordinary" };

static void show_dest(struct seq_file *m, const struct mr_dest *dest)
{
	seq_printf(m, "destination %pI6c member %u way %s failures %u held %u\n", &dest->address,
		   dest->id, path_names[dest->path], dest->failures,
		   skb_queue_len(&dest->held_skbs));
}

static int net_show(struct seq_file *m, void *unused)
{
	struct mr_dest *dest;
	unsigned int i;

	for (i = 0; i < MR_REASONS; i++)
		seq_printf(m, "%s %llu\n", reason_names[i], mr_count_sum(i));
	mutex_lock(&mr_net_lock);
	hash_for_each(mr_dests, i, dest, node)
		show_dest(m, dest);
	mutex_unlock(&mr_net_lock);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(net);

void mr_net_debugfs_init(void)
{
	file = debugfs_create_file("millrace_net", 0400, NULL, NULL, &net_fops);
}

void mr_net_debugfs_exit(void)
{
	debugfs_remove(file);
}
