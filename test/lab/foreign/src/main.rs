//! A guest without an operating system. Its virtio drivers are those of the crate `virtio-drivers`,
//! which has nothing from Linux: other sizes of rings, other features, no interrupts.
//!
//! # Theory of operation
//! QEMU starts it as it starts Linux (`-kernel`, by a PVH note), after its firmware has given PCI
//! devices their addresses. It looks for virtio devices on PCI bus 0, tries each as its part
//! ([`disk`], [`net`], [`vsock`]) says, and reports on the serial port, a line for each thing done.
//! What fails is a panic, which is a line, too.
//!
//! # Limits
//! It has one CPU, 16 MiB of heap that nothing goes back to, and one device of each kind.

#![no_std]
#![no_main]

extern crate alloc;

mod boot;
mod disk;
mod memory;
mod net;
mod pci;
mod serial;
mod vsock;

use virtio_drivers::transport::DeviceType;
use virtio_drivers::transport::pci::bus::{Command, PciRoot};
use virtio_drivers::transport::pci::{PciTransport, virtio_device_type};

use crate::memory::Identity;
use crate::pci::Ports;
use crate::serial::say;

/// Tries all devices; the network card is last, and answers until the guest is killed.
pub fn main() -> ! {
    let mut root = PciRoot::new(Ports);
    let mut card = None;
    for (place, about) in PciRoot::new(Ports).enumerate_bus(0) {
        let kind = virtio_device_type(&about);
        if !matches!(kind, Some(DeviceType::Block | DeviceType::Network | DeviceType::Socket)) {
            continue;
        }
        root.set_command(place, Command::MEMORY_SPACE | Command::BUS_MASTER);
        let transport = PciTransport::new::<Identity, _>(&mut root, place);
        let transport = transport.unwrap_or_else(|error| panic!("{place}: {error}"));
        match kind {
            Some(DeviceType::Block) => disk::exercise(transport),
            Some(DeviceType::Socket) => vsock::exercise(transport),
            _ => card = Some(transport),
        }
    }
    match card {
        Some(transport) => net::answer(transport),
        None => panic!("no network card"),
    }
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo) -> ! {
    say!("foreign: {info}");
    boot::end()
}
