// SPDX-License-Identifier: GPL-2.0
/*
 * millrace_net: IP packets between guests of one host over millrace_channel.
 *
 * Theory of operation
 *
 * A hook behind all others at LOCAL_OUT (net_hook.c) looks up a packet's destination among the
 * addresses of the other members (net_table.c). A destination is used once the neighbour that
 * this guest learned by ARP or NDP and the host's member table agree (net_move.c), so neither a
 * spoofed answer nor a stale table moves anything. Its packets become messages (net_send.c) and
 * enter the peer's stack above the link layer (net_receive.c). Programs, sockets, routes and
 * rules stay as they are.
 *
 * A destination changes its path without changing the order of its packets; packets that cannot or
 * may not be taken go the ordinary way.
 *
 * For appliances there is, besides, a network device on the channel (net_device.c).
 *
 * Limits: the initial network namespace; TCP and UDP, with neither IP options nor extension
 * headers, to neighbours; XDP programs of the receiver's device do not see the packets.
 */
#include <linux/module.h>
#include <linux/netdevice.h>

#include "net.h"

DEFINE_PER_CPU(u64[MR_REASONS], mr_net_counts);

const struct mr_client mr_net_client = {
	.id = MR_CLIENT_NET,
	.name = "net",
	.owner = THIS_MODULE,
	.peer_up = mr_move_peer_up,
	.peer_down = mr_move_peer_down,
	.receive = mr_receive,
	.received = mr_received,
	.writable = mr_backlog_writable,
	.table_changed = mr_table_changed,
};

static int device_event(struct notifier_block *nb, unsigned long event, void *data)
{
	struct net_device *dev = netdev_notifier_info_to_dev(data);

	switch (event) {
	case NETDEV_UNREGISTER:
	case NETDEV_GOING_DOWN:
		mr_table_devices_changed(dev);
		break;
	case NETDEV_UP:
	case NETDEV_CHANGEADDR:
	case NETDEV_CHANGEUPPER:
		mr_table_devices_changed(NULL);
		break;
	default:
		return NOTIFY_DONE;
	}
	mr_move_recheck();
	return NOTIFY_DONE;
}

static struct notifier_block device_notifier = { .notifier_call = device_event };

static int __init net_init(void)
{
	int err;

	mr_backlog_init();
	mr_receive_init();
	err = mr_move_init();
	if (err)
		goto receive;
	err = register_netdevice_notifier(&device_notifier);
	if (err)
		goto move;
	err = mr_client_register(&mr_net_client);
	if (err)
		goto notifier;
	err = mr_hooks_register();
	if (err)
		goto client;
	err = mr_device_init();
	if (err)
		goto hooks;
	mr_net_debugfs_init();
	return 0;
hooks:
	mr_move_stop();
	mr_hooks_unregister();
client:
	mr_client_unregister(&mr_net_client);
notifier:
	unregister_netdevice_notifier(&device_notifier);
move:
	mr_move_exit();
receive:
	mr_receive_exit();
	return err;
}

static void __exit net_exit(void)
{
	mr_net_debugfs_exit();
	mr_device_exit();
	mr_move_stop();
	mr_hooks_unregister();
	mr_client_unregister(&mr_net_client);
	unregister_netdevice_notifier(&device_notifier);
	mr_receive_exit();
	mr_move_exit();
	/* Destinations and nodes that are freed by RCU. */
	rcu_barrier();
}

module_init(net_init);
module_exit(net_exit);
MODULE_DESCRIPTION("IP between guests of one host through shared memory");
MODULE_LICENSE("GPL");
