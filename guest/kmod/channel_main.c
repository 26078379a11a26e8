// SPDX-License-Identifier: GPL-2.0
/*
 * millrace_channel: messages between guests of one host through shared memory.
 *
 * Theory of operation
 *
 * The host plugs two kinds of ivshmem devices into this guest. One has doorbells and a mailbox
 * (channel_mailbox.c) which lists the members of our trust domain. The others are the
 * memory of those members, one read-only device each (channel_memory.c). A member that is in the
 * table and whose memory is here becomes a peer (channel_link.c).
 *
 * A member's messages to a peer lie in its own memory, and the peer reads them there: a directory
 * page, whose place the host knows; from there a page per link; from there rings, slots, FIFOs and
 * indices (channel_queue.c). So a guest can write only its own messages in the memory that another
 * one reads, and these are copied, checked and used (channel_rx.c). Sending writes own memory and
 * rings a doorbell, if the peer has asked for one (channel_tx.c); no more of it than the host has
 * allowed us (channel_ceiling.c).
 *
 * Limits: millrace_abi.h. Memory of a peer costs 64 bytes for each of its pages; rings cost
 * 132 KiB and the FIFO (parameter fifo_kb) for each queue and peer.
 */
#include <linux/bitfield.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/sched.h>
#include <linux/slab.h>

#include "channel.h"

DEFINE_MUTEX(mr_lock); /* outside rtnl and every client's lock */
struct mr_channel *mr_channel;
LIST_HEAD(mr_memories);

unsigned int mr_fifo_kb = 512;
module_param_named(fifo_kb, mr_fifo_kb, uint, 0444);
MODULE_PARM_DESC(fifo_kb,
		 "KiB of copied messages in flight, per queue and peer: 128 to 2048, 2^n (512)");

static u32 guest_state(struct mr_channel *ch)
{
	if (!ch->leaving)
		return MR_GUEST_ACTIVE;
	return mr_links_are_closed(ch) ? MR_GUEST_LEFT : MR_GUEST_LEAVING;
}

/* Updates `leaving` from the table: the host may ask us to leave, and may withdraw that. */
static void update_leaving(struct mr_channel *ch)
{
	u32 state = le32_to_cpu(ch->table[ch->own_index].state);

	ch->leaving = ch->stopping || state == MR_MEMBER_LEAVING;
}

static void control(struct mr_channel *ch)
{
	if (mr_mailbox_read_table(ch)) {
		update_leaving(ch);
		mr_clients_table_changed();
	}
	mr_links_update(ch);
	mr_mailbox_report(ch, guest_state(ch));
}

static void control_work(struct work_struct *work)
{
	struct mr_channel *ch = container_of(work, struct mr_channel, control);

	mutex_lock(&mr_lock);
	if (mr_channel == ch)
		control(ch);
	mutex_unlock(&mr_lock);
}

static void beat_work(struct work_struct *work)
{
	struct mr_channel *ch = container_of(work, struct mr_channel, beat.work);

	mutex_lock(&mr_lock);
	if (mr_channel == ch) {
		WRITE_ONCE(ch->dir->heartbeat,
			   cpu_to_le64(le64_to_cpu(ch->dir->heartbeat) + 1));
		mr_links_beat(ch);
		mr_links_update(ch);
		mr_mailbox_report(ch, guest_state(ch));
		mr_poll_measure(ch);
		queue_delayed_work(ch->work, &ch->beat, msecs_to_jiffies(ch->heartbeat_ms));
	}
	mutex_unlock(&mr_lock);
}

static int dir_alloc(struct mr_channel *ch)
{
	u64 off;

	ch->dir = mr_alloc_shared(ch, 0, &off);
	if (!ch->dir)
		return -ENOMEM;
	ch->dir->version = cpu_to_le32(MR_VERSION);
	ch->dir->member_id = cpu_to_le32(ch->id);
	ch->dir->generation = cpu_to_le64(ch->generation);
	mr_publish64(&ch->dir->magic, MR_DIR_MAGIC);
	return 0;
}

static void channel_free(struct mr_channel *ch)
{
	if (ch->work)
		destroy_workqueue(ch->work);
	if (ch->dir)
		free_page((unsigned long)ch->dir);
	if (ch->mailbox)
		memunmap(ch->mailbox);
	kvfree(ch);
}

static int channel_open(struct mr_channel *ch)
{
	struct pci_dev *pdev = ch->pdev;
	int err;

	ch->regs = pcim_iomap(pdev, 0, 0);
	ch->mailbox = memremap(pci_resource_start(pdev, 2), MR_MAILBOX_LEN, MEMREMAP_WB);
	ch->work = alloc_ordered_workqueue("millrace", WQ_MEM_RECLAIM);
	if (!ch->regs || !ch->mailbox || !ch->work)
		return -ENOMEM;
	err = mr_mailbox_open(ch);
	if (err)
		return err;
	err = dir_alloc(ch);
	if (err)
		return err;
	err = pci_alloc_irq_vectors(pdev, ch->vectors, ch->vectors, PCI_IRQ_MSIX);
	if (err < 0)
		return err;
	err = mr_vectors_start(ch);
	if (err)
		pci_free_irq_vectors(pdev);
	return err;
}

static int doorbell_probe(struct pci_dev *pdev)
{
	struct mr_channel *ch;
	int err;

	if (pci_resource_len(pdev, 2) < MR_MAILBOX_LEN)
		return -ENODEV;
	ch = kvzalloc(sizeof(*ch), GFP_KERNEL);
	if (!ch)
		return -ENOMEM;
	ch->pdev = pdev;
	INIT_WORK(&ch->control, control_work);
	INIT_DELAYED_WORK(&ch->beat, beat_work);
	mr_ceiling_init(ch);
	pci_set_master(pdev);
	err = channel_open(ch);
	if (!err) {
		mutex_lock(&mr_lock);
		err = mr_channel ? -EBUSY : 0;
		if (!err)
			mr_channel = ch;
		mutex_unlock(&mr_lock);
		if (err) {
			mr_vectors_stop(ch);
			pci_free_irq_vectors(pdev);
		}
	}
	if (err) {
		channel_free(ch);
		return err;
	}
	pci_set_drvdata(pdev, ch);
	pci_info(pdev, "member %u, %u queues\n", ch->id, ch->queues);
	queue_work(ch->work, &ch->control);
	queue_delayed_work(ch->work, &ch->beat, 0);
	return 0;
}

/*
 * Leaves the channel. Usually the host has asked for it before, and no work is left. Else this
 * waits until peers have taken all messages and given pages back, which may take long.
 */
static void doorbell_remove(struct mr_channel *ch)
{
	bool closed;

	mutex_lock(&mr_lock);
	ch->stopping = true;
	ch->leaving = true;
	for (;;) {
		mr_links_beat(ch);
		mr_links_update(ch);
		closed = mr_links_are_closed(ch);
		mr_mailbox_report(ch, guest_state(ch));
		mutex_unlock(&mr_lock);
		if (closed)
			break;
		/* Idle: a long wait here is no hung task. */
		schedule_timeout_idle(msecs_to_jiffies(10));
		mutex_lock(&mr_lock);
	}
	mutex_lock(&mr_lock);
	mr_channel = NULL;
	mr_clients_table_changed();
	mutex_unlock(&mr_lock);
	cancel_delayed_work_sync(&ch->beat);
	mr_vectors_stop(ch);
	cancel_work_sync(&ch->control);
	mr_ceiling_exit(ch);
	pci_free_irq_vectors(ch->pdev);
	channel_free(ch);
}

/* Number of the physical slot, as the host knows it: the slot of the root port above. */
static u32 read_slot_number(struct pci_dev *pdev)
{
	struct pci_dev *port = pci_upstream_bridge(pdev);
	u32 cap = 0;

	if (port)
		pcie_capability_read_dword(port, PCI_EXP_SLTCAP, &cap);
	return FIELD_GET(PCI_EXP_SLTCAP_PSN, cap);
}

static int memory_probe(struct pci_dev *pdev)
{
	struct mr_memory *memory = kzalloc(sizeof(*memory), GFP_KERNEL);

	if (!memory)
		return -ENOMEM;
	memory->pdev = pdev;
	memory->slot = read_slot_number(pdev);
	pci_set_drvdata(pdev, memory);
	mutex_lock(&mr_lock);
	list_add(&memory->list, &mr_memories);
	if (mr_channel)
		queue_work(mr_channel->work, &mr_channel->control);
	mutex_unlock(&mr_lock);
	return 0;
}

/* Waits until a peer's memory has no user, as doorbell_remove() does for the whole channel. */
static void memory_remove(struct mr_memory *memory)
{
	mutex_lock(&mr_lock);
	list_del(&memory->list);
	while (memory->mapped) {
		struct mr_peer *peer = memory->peer;

		/* The table may not say so yet. */
		peer->dead = true;
		mr_links_update(peer->ch);
		mutex_unlock(&mr_lock);
		schedule_timeout_idle(msecs_to_jiffies(10));
		mutex_lock(&mr_lock);
	}
	mutex_unlock(&mr_lock);
	kfree(memory);
}

/* Whether a device is the one with doorbells: it has interrupts and their BAR, memory has none. */
static bool is_doorbell(struct pci_dev *pdev)
{
	return pci_resource_len(pdev, 1) != 0;
}

static int probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	int err = pcim_enable_device(pdev);

	if (err)
		return err;
	return is_doorbell(pdev) ? doorbell_probe(pdev) : memory_probe(pdev);
}

static void remove(struct pci_dev *pdev)
{
	if (is_doorbell(pdev))
		doorbell_remove(pci_get_drvdata(pdev));
	else
		memory_remove(pci_get_drvdata(pdev));
}

static const struct pci_device_id ids[] = {
	{ PCI_DEVICE(PCI_VENDOR_ID_REDHAT_QUMRANET, 0x1110) }, /* ivshmem */
	{}
};
MODULE_DEVICE_TABLE(pci, ids);

static struct pci_driver driver = {
	.name = "millrace_channel",
	.id_table = ids,
	.probe = probe,
	.remove = remove,
};

static int __init channel_init(void)
{
	int err;

	err = mr_pages_register();
	if (err)
		return err;
	mr_debugfs_init();
	err = pci_register_driver(&driver);
	if (err) {
		mr_debugfs_exit();
		mr_pages_unregister();
	}
	return err;
}

/* The doorbell device first: afterwards no memory is in use. */
static void __exit channel_exit(void)
{
	struct pci_dev *pdev = NULL;

	mutex_lock(&mr_lock);
	if (mr_channel)
		pdev = pci_dev_get(mr_channel->pdev);
	mutex_unlock(&mr_lock);
	if (pdev) {
		device_release_driver(&pdev->dev);
		pci_dev_put(pdev);
	}
	pci_unregister_driver(&driver);
	mr_debugfs_exit();
	mr_pages_unregister();
	/*
	 * Peers that are freed by kfree_rcu() need no code of this kernel module; clients are
	 * unregistered.
	 */
	rcu_barrier();
}

module_init(channel_init);
module_exit(channel_exit);
MODULE_DESCRIPTION("Messages between guests of one host through shared memory");
MODULE_LICENSE("GPL");
