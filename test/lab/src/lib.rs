//! Boots real VMs for tests, demo and benchmarks.
//!
//! ```no_run
//! use std::time::Duration;
//! use lab::{Guest, Lab, Net};
//!
//! fn main() -> Result<(), lab::LabError> {
//!     let lab = Lab::new()?; // cache, run folder, private network namespace
//!     lab.net().bridge("br0")?;
//!     lab.net().tap("tap0", Some("br0"))?;
//!     lab.net().tap("tap1", Some("br0"))?;
//!     let a = Guest::builder("a").net(Net::tap("tap0")).address("10.0.0.1/24");
//!     let b = Guest::builder("b").net(Net::tap("tap1")).address("10.0.0.2/24");
//!     // Both boot at once; waits for their agents and sets the addresses.
//!     let [a, b] = lab::boot(&lab, [a, b], Duration::from_secs(30))?;
//!     println!("{}", a.sh("ping -c 1 10.0.0.2")?);
//!     // Tools of the agent print JSON; a server says "listening" when it is ready.
//!     let mut server = b.spawn("agent rr-server")?;
//!     server.wait_line("listening", Duration::from_secs(10))?;
//!     let result = a.run("agent rr tcp 10.0.0.2 2")?.json()?;
//!     println!("{} round trips a second", result["rate"]);
//!     server.kill()?;
//!     Ok(())
//! }
//! ```
//!
//! # Theory of operation
//! A [`Lab`] is one session: it owns a run folder for sockets and logs, a [`NetLab`] (a network
//! namespace without a name) and a view of the [`Cache`]. The cache holds Debian's cloud kernels
//! ([`Kernel`]), unpacked from their packages, and initramfs images ([`Image`]) made from recipes
//! by our own [`cpio`] writer: busybox, the static agent (package `millrace-lab-agent`), modules in
//! load order ([`modules`]), host programs with their libraries, and on demand Millrace's own
//! kernel modules, which [`kmod`] builds and checks with the headers of that very kernel,
//! [`python`] with QUIC, or `fsx` (package `millrace-lab-fsx`), which does random operations on
//! files or a disk and compares each byte that it reads with a model.
//!
//! A [`Guest`] is a QEMU process with shared memory, a console in a file, a monitor
//! socket and a virtio-serial port on which the agent answers. QEMU connects to sockets that the
//! lab has bound before, so nothing polls for files; waits are on sockets and process descriptors.
//! When a guest dies, whatever is being asked of it fails with the kernel's panic line, the last
//! 40 console lines and QEMU's own words; one that is silent, or left by a test that fails, tells
//! where its CPUs are and what their interrupt controllers hold. QEMU is that of Debian's
//! backports; `MILLRACE_QEMU` names another ([`QemuChoice`]). KVM runs the guests where a guest has
//! been seen to boot under it, else QEMU emulates them; `MILLRACE_ACCEL` forces either
//! ([`acceleration`]).
//!
//! A [`libvirt::Libvirt`] is Debian's libvirtd, whose domains boot the same kernels and images
//! ([`GuestBuilder::boot_files`]).
//!
//! A [`Daemon`] is a `millrace` process under test with a generated configuration.
//!
//! Nothing outlives the session: children are started by one long-lived thread with a parent-death
//! signal, so the kernel kills them when the lab ends, SIGKILL included; the namespace and what is
//! in it go with its last process; run folders of dead sessions are removed by the next one.
//!
//! # Limits
//! | what | number | why |
//! | --- | --- | --- |
//! | guest memory | 128 MB, or 80 MB + 2.5 × the image | the initramfs is in memory twice while it unpacks |
//! | guest name | 16 bytes | Unix socket paths hold 107 |
//! | output of one command | 64 MiB ([`agent::MAX_OUTPUT_BYTES`]) | the rest is dropped, not kept in the lab's memory |
//! | one file out of a guest | 1 GiB ([`agent::MAX_FILE_BYTES`]) | the same |
//! | commands at once | 64 in a guest | see the agent |
//! | CPU times | steps of 10 ms | the kernel's clock tick in `/proc/PID/stat` |
//! | probe of KVM | 5 s of CPU time | a `/dev/kvm` may be there and run no guest |

pub mod agent;
pub mod apt;
pub mod builder;
pub mod console;
pub mod cpio;
pub mod device;
pub mod firmware;
pub mod kmod;
pub mod libvirt;
pub mod mariadb;
pub mod modules;
pub mod netboot;
pub mod process;
pub mod python;
pub mod qemu72;
pub mod rootfs;

mod accel;
mod boot;
mod boot_files;
mod cache;
mod command;
mod cpus;
mod daemon;
mod error;
mod guest;
mod headers;
mod image;
mod kernel;
mod lab;
mod machine;
mod memory;
mod netlab;
mod program;
mod qemu;
mod qmp;
mod sources;
mod threads;
mod tsc;
mod vhost;

pub use accel::{AccelChoice, Acceleration, Accelerator};
pub use boot::{boot, boot_all};
pub use boot_files::BootFiles;
pub use builder::{GuestBuilder, acceleration};
pub use cache::Cache;
pub use command::{Output, Running};
pub use daemon::{Daemon, DaemonBuilder, Vm, metric_sum};
pub use device::{Aio, CacheMode, Disk, Format, Net, QemuFile, VhostUserDisk, VhostUserNet, Vsock};
pub use error::LabError;
pub use firmware::Firmware;
pub use guest::Guest;
pub use image::{Image, ImageBuilder};
pub use kernel::{Kernel, KernelChoice};
pub use lab::Lab;
pub use machine::DEFAULT_TIMEOUT;
pub use netlab::NetLab;
pub use program::{AGENT_SERVICE, foreign};
pub use qemu::{Qemu, QemuChoice};
pub use vhost::{vhost_net, vhost_threads};
