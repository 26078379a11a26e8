//! PCI's configuration space by its two ports.

use core::arch::asm;

use virtio_drivers::transport::pci::bus::{ConfigurationAccess, DeviceFunction};

const ADDRESS: u16 = 0xcf8;
const DATA: u16 = 0xcfc;
const ENABLE: u32 = 1 << 31;

/// Configuration space by ports.
pub struct Ports;

fn choose(place: DeviceFunction, register: u8) {
    let DeviceFunction { bus, device, function } = place;
    let place = u32::from(bus) << 16 | u32::from(device) << 11 | u32::from(function) << 8;
    let address = ENABLE | place | u32::from(register & 0xfc);
    // SAFETY: the port chooses a register and touches no memory.
    unsafe { asm!("out dx, eax", in("dx") ADDRESS, in("eax") address, options(nomem, nostack)) }
}

impl ConfigurationAccess for Ports {
    fn read_word(&self, place: DeviceFunction, register: u8) -> u32 {
        choose(place, register);
        let word: u32;
        // SAFETY: reads the register that was chosen, and touches no memory.
        unsafe { asm!("in eax, dx", in("dx") DATA, out("eax") word, options(nomem, nostack)) }
        word
    }

    fn write_word(&mut self, place: DeviceFunction, register: u8, word: u32) {
        choose(place, register);
        // SAFETY: the caller writes registers of a device that is its own.
        unsafe { asm!("out dx, eax", in("dx") DATA, in("eax") word, options(nostack)) }
    }

    unsafe fn unsafe_clone(&self) -> Self {
        Self
    }
}
