//! Parts of a guest, and QEMU's command line for it.

use std::path::{Path, PathBuf};

use crate::accel::{self, Answer, PROBE_CPU, PROBE_TIME};
use crate::boot_files::BootFiles;
use crate::device::{Arguments, Disk, MAX_ROOT_PORTS, Net, Vsock, quoted};
use crate::firmware::Firmware;
use crate::machine::Files;
use crate::memory::Memory;
use crate::{
    Acceleration, Accelerator, Guest, Image, ImageBuilder, Kernel, KernelChoice, Lab, LabError,
    Qemu,
};

/// Most guests' memory.
pub const DEFAULT_MEMORY_MB: u32 = 128;
/// Least memory a kernel with its initramfs boots in, besides twice the image.
const KERNEL_MB: u64 = 80;
/// Seconds for which a guest's CPU may stand still before its kernel calls that a fault. An
/// emulated CPU is a thread of the host's, and hosts were seen that left one waiting for 37 s, a
/// worker of their own kernel ("workqueue lockup" in its log). The kernel's own limit is 21 s.
const STALL_S: u32 = 120;
/// Longest guest name: it is part of socket paths.
const MAX_NAME_BYTES: usize = 16;

/// Describes a guest; [`start`](Self::start) boots it.
#[derive(Clone, Debug)]
pub struct GuestBuilder {
    pub(crate) name: String,
    memory_mb: u32,
    power_of_two: bool,
    aligned_memory: bool,
    vcpus: u32,
    pub(crate) host_cpus: Vec<usize>,
    kernel: KernelChoice,
    image: ImageBuilder,
    boot: Boot,
    cmdline: Vec<String>,
    nets: Vec<Net>,
    disks: Vec<Disk>,
    vsock: Option<Vsock>,
    root_disk: bool,
    root_ports: u8,
    monitor: Option<PathBuf>,
    modules: Vec<String>,
    qemu_arguments: Vec<String>,
    pub(crate) addresses: Vec<(usize, String)>,
}

/// Program that a guest starts.
#[derive(Clone, Debug)]
enum Boot {
    /// The kernel, loaded by QEMU.
    Linux,
    /// A firmware, which looks for something to boot.
    Firmware(Firmware),
    /// A program of the host's file system.
    Program(PathBuf),
}

/// Accelerator of all guests of this process, as `MILLRACE_ACCEL` chooses. It is found out on first
/// use, by a guest that boots under KVM or does not.
///
/// # Errors
/// KVM is asked for and runs no guest, with the reason; there is no QEMU, kernel or image to find
/// that out with.
pub fn acceleration(lab: &Lab) -> Result<Acceleration, LabError> {
    accel::of_process(|| {
        let (qemu, kernel) = (lab.qemu()?, lab.kernel(KernelChoice::default())?);
        let program = qemu.program().display();
        let what = format!("{program} {:?} {}", qemu.version(), kernel.release());
        accel::answer(lab.cache(), &what, || probe(lab, qemu))
    })
}

/// Boots a guest under KVM.
fn probe(lab: &Lab, qemu: Qemu) -> Result<Answer, LabError> {
    eprintln!("lab: asking KVM to run a guest, for {PROBE_CPU:?} of CPU time at most");
    let started = GuestBuilder::new("kvm-probe").start_by(lab, qemu.under(Accelerator::Kvm));
    let guest = match started {
        Ok(guest) => guest,
        Err(error) => return accel::refusal(error, None),
    };
    match guest.has_started(PROBE_CPU, PROBE_TIME) {
        Ok(()) => Ok(Ok(())),
        Err(error) => accel::refusal(error, guest.cpu_time().ok()),
    }
}

impl GuestBuilder {
    pub(crate) fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            memory_mb: DEFAULT_MEMORY_MB,
            power_of_two: false,
            aligned_memory: false,
            vcpus: 1,
            host_cpus: Vec::new(),
            kernel: KernelChoice::default(),
            image: Image::builder(),
            boot: Boot::Linux,
            cmdline: Vec::new(),
            nets: Vec::new(),
            disks: Vec::new(),
            vsock: None,
            root_disk: false,
            root_ports: 0,
            monitor: None,
            modules: Vec::new(),
            qemu_arguments: Vec::new(),
            addresses: Vec::new(),
        }
    }

    /// Memory in MiB; [`DEFAULT_MEMORY_MB`] unless set, more when the image needs it.
    #[must_use]
    pub fn memory_mb(mut self, memory_mb: u32) -> Self {
        self.memory_mb = memory_mb;
        self
    }

    /// Rounds the memory up to a power of two, as a member of channels must have it: its peers see
    /// it as a PCI BAR.
    #[must_use]
    pub fn memory_power_of_two(mut self) -> Self {
        self.power_of_two = true;
        self
    }

    /// Puts memory that is shared where the host's CPU can have a huge page as one: in a file of
    /// `/dev/shm`, as docs/operate/sidecores.md advises, as long as there is room.
    #[must_use]
    pub fn aligned_memory(mut self) -> Self {
        self.aligned_memory = true;
        self
    }

    /// Virtual CPUs; 1 unless set.
    #[must_use]
    pub fn vcpus(mut self, vcpus: u32) -> Self {
        self.vcpus = vcpus;
        self
    }

    /// Host CPUs that QEMU may run on; all unless set.
    #[must_use]
    pub fn host_cpus(mut self, cpus: &[usize]) -> Self {
        self.host_cpus = cpus.to_vec();
        self
    }

    /// The kernel; 6.1 unless set.
    #[must_use]
    pub fn kernel(mut self, kernel: KernelChoice) -> Self {
        self.kernel = kernel;
        self
    }

    /// The initramfs' recipe; busybox, agent and virtio modules unless set.
    #[must_use]
    pub fn image(mut self, image: ImageBuilder) -> Self {
        self.image = image;
        self
    }

    /// Starts a firmware in place of the kernel. It boots what the devices have, in the order of
    /// their property `bootindex`: see [`crate::firmware`].
    #[must_use]
    pub fn firmware(mut self, firmware: Firmware) -> Self {
        self.boot = Boot::Firmware(firmware);
        self
    }

    /// Starts a program in place of Linux: one without an operating system, and without the agent.
    /// Use [`Guest::console_tail`] to see what it says.
    #[must_use]
    pub fn program(mut self, path: impl Into<PathBuf>) -> Self {
        self.boot = Boot::Program(path.into());
        self
    }

    /// Adds words to the kernel command line.
    #[must_use]
    pub fn cmdline(mut self, words: impl Into<String>) -> Self {
        self.cmdline.push(words.into());
        self
    }

    /// Adds a network card: `eth0`, `eth1`, … in order.
    #[must_use]
    pub fn net(mut self, net: impl Into<Net>) -> Self {
        self.nets.push(net.into());
        self
    }

    /// Gives the network card added last an address such as `10.0.0.1/24` or `fd00::1/64`, set
    /// (and the card brought up) when the guest is ready.
    #[must_use]
    pub fn address(mut self, address: impl Into<String>) -> Self {
        let slot = self.nets.iter().filter(|net| **net != Net::None).count().saturating_sub(1);
        self.addresses.push((slot, address.into()));
        self
    }

    /// Adds a disk: `/dev/vda`, `/dev/vdb`, … in order.
    #[must_use]
    pub fn disk(mut self, disk: impl Into<Disk>) -> Self {
        self.disks.push(disk.into());
        self
    }

    /// Adds the vsock device.
    #[must_use]
    pub fn vsock(mut self, vsock: Vsock) -> Self {
        self.vsock = Some(vsock);
        self
    }

    /// Commands and files live on the first disk, an ext4 root (see [`crate::rootfs`]).
    #[must_use]
    pub fn root_on_first_disk(mut self) -> Self {
        self.root_disk = true;
        self
    }

    /// Adds PCIe root ports `millrace0`, `millrace1`, …, at most [`MAX_ROOT_PORTS`], into which
    /// devices with BARs of up to 1 GiB together can be plugged while the guest runs.
    #[must_use]
    pub fn root_ports(mut self, number: u8) -> Self {
        self.root_ports = number;
        self
    }

    /// Adds a monitor at a socket on which QEMU listens: the daemon's. The lab's own stays.
    #[must_use]
    pub fn monitor(mut self, socket: impl Into<PathBuf>) -> Self {
        self.monitor = Some(socket.into());
        self
    }

    /// Loads a module of the image at boot.
    #[must_use]
    pub fn load_module(mut self, name: impl Into<String>) -> Self {
        self.modules.push(name.into());
        self
    }

    /// Adds memory that is a file of the host, which others map as well: QEMU's `ivshmem-plain`.
    #[must_use]
    pub fn shared_memory(self, file: &Path, bytes: u64) -> Self {
        let file = file.to_string_lossy().replace(',', ",,");
        self.qemu_args::<String>([
            "-object".into(),
            format!("memory-backend-file,id=ring,mem-path={file},size={bytes},share=on"),
            "-device".into(),
            "ivshmem-plain,memdev=ring".into(),
        ])
    }

    /// Adds raw QEMU arguments at the end of the command line.
    #[must_use]
    pub fn qemu_args<S: Into<String>>(mut self, arguments: impl IntoIterator<Item = S>) -> Self {
        self.qemu_arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// Boots the guest; returns when QEMU runs. Use [`Guest::wait_ready`] next.
    ///
    /// # Errors
    /// A wrong name; kernel or image cannot be had; QEMU ends at once (its text is in the error).
    pub fn start(self, lab: &Lab) -> Result<Guest, LabError> {
        let fine = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if self.name.is_empty() || self.name.len() > MAX_NAME_BYTES || !self.name.chars().all(fine)
        {
            return Err(LabError::Refused(format!(
                "guest name {:?}: 1 to {MAX_NAME_BYTES} letters, digits, '-' or '_'",
                self.name
            )));
        }
        if self.root_ports > MAX_ROOT_PORTS {
            let ports = self.root_ports;
            return Err(LabError::Refused(format!("{ports} root ports: {MAX_ROOT_PORTS} at most")));
        }
        let qemu = lab.qemu()?.under(acceleration(lab)?.accelerator);
        self.start_by(lab, qemu)
    }

    /// Boots the guest by this QEMU.
    fn start_by(self, lab: &Lab, qemu: Qemu) -> Result<Guest, LabError> {
        let kernel = lab.kernel(self.kernel)?;
        let image = lab.image(&self.image, self.kernel)?;
        let files = Files::new(lab, &self.name);
        let boot = match &self.boot {
            Boot::Linux => self.direct_boot(&kernel, &image, qemu.accelerator()),
            Boot::Firmware(firmware) => firmware.arguments(lab, &self.name)?,
            Boot::Program(path) => vec!["-kernel".into(), path.to_string_lossy().into_owned()],
        };
        let arguments = self.arguments(boot, &image, &files, &qemu);
        Guest::launch(lab, self, files, qemu, &arguments)
    }

    /// Files with which a VMM that the lab does not start, or a boot loader, boots the same guest,
    /// emulated. Its modules are those of the builder's devices and of
    /// [`load_module`](Self::load_module).
    ///
    /// # Errors
    /// Kernel or image cannot be had.
    pub fn boot_files(&self, lab: &Lab) -> Result<BootFiles, LabError> {
        let (kernel, image) = (lab.kernel(self.kernel)?, lab.image(&self.image, self.kernel)?);
        Ok(BootFiles {
            kernel: kernel.image(),
            compressed_kernel: kernel.compressed_image(),
            initrd: image.path().into(),
            append: self.kernel_cmdline(Accelerator::Tcg),
            memory_mb: self.enough_memory_mb(&image),
        })
    }

    /// Memory that lets the image unpack: it is there twice for a moment.
    fn enough_memory_mb(&self, image: &Image) -> u64 {
        let image_mb = image.len_bytes() >> 20;
        let memory_mb = u64::from(self.memory_mb).max(KERNEL_MB + image_mb * 5 / 2);
        if self.power_of_two { memory_mb.next_power_of_two() } else { memory_mb }
    }

    fn kernel_cmdline(&self, accelerator: Accelerator) -> String {
        let mut modules: Vec<&str> = Vec::new();
        if self.nets.iter().any(|net| *net != Net::None) {
            modules.push("virtio_net");
        }
        if !self.disks.is_empty() {
            modules.push("virtio_blk");
        }
        if self.vsock.is_some() {
            modules.push("vmw_vsock_virtio_transport");
        }
        modules.extend(self.modules.iter().map(String::as_str));
        // Each word makes a crash end the VM at once or saves boot time; a ramfs root takes an
        // image of more than half the memory, which a tmpfs does not.
        let mut words = String::from(
            "console=ttyS0 quiet loglevel=4 panic=-1 random.trust_cpu=on net.ifnames=0 \
             rootfstype=ramfs",
        );
        if accelerator.is_emulator() {
            words.push_str(" tsc=reliable mitigations=off no_timer_check cryptomgr.notests");
            words.push_str(&format!(" rcupdate.rcu_cpu_stall_timeout={STALL_S}"));
            if let Some(khz) = crate::tsc::khz() {
                words.push_str(&format!(" tsc_early_khz={khz}"));
            }
        }
        words.push_str(&format!(" lab.name={} lab.mods={}", self.name, modules.join(",")));
        if self.root_disk {
            words.push_str(" lab.root=vda");
        }
        for more in &self.cmdline {
            words.push(' ');
            words.push_str(more);
        }
        words
    }

    /// Room for another CPU makes TCG keep the guest's memory barriers, which it drops where
    /// nothing in the same VM could see the difference; another VM that reads this one's memory
    /// can.
    fn smp(&self, accelerator: Accelerator) -> String {
        let max = if self.root_ports > 0 && accelerator.is_emulator() {
            self.vcpus.max(2)
        } else {
            self.vcpus
        };
        format!("{},maxcpus={max}", self.vcpus)
    }

    /// Whether somebody maps the guest's memory. QEMU's own devices do not: there it is private,
    /// as users of those have it, and in huge pages.
    fn shares_memory(&self) -> bool {
        let own_cards = self.nets.iter().all(|net| !matches!(net, Net::VhostUser(_)));
        let own_disks = self.disks.iter().all(|disk| !matches!(disk, Disk::VhostUser(_)));
        let only_own = own_cards && own_disks && self.vsock.is_none() && self.root_ports == 0;
        !(only_own && self.qemu_arguments.is_empty())
    }

    fn memory(&self) -> Memory {
        match self.shares_memory() {
            false => Memory::Private,
            true if self.aligned_memory => Memory::Aligned,
            true => Memory::Memfd,
        }
    }

    /// Arguments that let QEMU load the kernel.
    fn direct_boot(&self, kernel: &Kernel, image: &Image, accelerator: Accelerator) -> Vec<String> {
        let path = |path: &Path| path.to_string_lossy().into_owned();
        let words = [("kernel", path(&kernel.image())), ("initrd", path(image.path()))];
        let words = words.into_iter().chain([("append", self.kernel_cmdline(accelerator))]);
        words.flat_map(|(option, value)| [format!("-{option}"), value]).collect()
    }

    fn arguments(
        &self,
        boot: Vec<String>,
        image: &Image,
        files: &Files,
        qemu: &Qemu,
    ) -> Vec<String> {
        let mut arguments = Arguments::for_qemu(qemu);
        arguments.words.extend(["-nodefaults", "-no-user-config", "-no-reboot"].map(String::from));
        let memory = self.enough_memory_mb(image);
        arguments.add("display", "none");
        arguments.add("machine", "q35,memory-backend=mem");
        let accelerator = qemu.accelerator();
        let (accel, cpu) = accelerator.qemu_words();
        arguments.add("accel", accel);
        arguments.add("cpu", cpu);
        arguments.add("smp", self.smp(accelerator));
        arguments.add("m", memory);
        arguments.add("object", self.memory().object(memory));
        arguments.words.extend(boot);
        arguments.add("serial", format!("file:{}", files.console.to_string_lossy()));
        // Lets a kernel module under test end the VM with a code.
        arguments.add("device", "isa-debug-exit,iobase=0xf4,iosize=4");
        // QEMU is the client of both sockets, so nobody has to look for them.
        arguments.add("chardev", format!("socket,id=qmp,path={}", quoted(&files.qmp)));
        arguments.add("mon", "chardev=qmp,mode=control");
        if let Some(monitor) = &self.monitor {
            arguments.monitor(monitor);
        }
        arguments.add("chardev", format!("socket,id=agent,path={}", quoted(&files.agent)));
        arguments.add("device", "virtio-serial-pci,id=serial");
        arguments.add("device", "virtserialport,bus=serial.0,nr=1,chardev=agent,name=agent");
        for (slot, net) in self.nets.iter().enumerate() {
            arguments.net(&self.name, slot, net);
        }
        for (slot, disk) in self.disks.iter().enumerate() {
            arguments.disk(slot, disk);
        }
        if let Some(vsock) = &self.vsock {
            arguments.vsock(vsock);
        }
        arguments.root_ports(self.root_ports);
        arguments.words.extend(self.qemu_arguments.iter().cloned());
        arguments.words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_follow_devices_and_addresses_follow_cards() {
        let guest = GuestBuilder::new("a")
            .net(Net::None)
            .net(Net::tap("t0"))
            .address("10.0.0.1/24")
            .net(Net::tap("t1"))
            .address("fd00::1/64")
            .vsock(Vsock::vhost_user("/s"))
            .cmdline("extra=1");
        let words = guest.kernel_cmdline(Accelerator::Tcg);
        assert!(words.contains("lab.mods=virtio_net,vmw_vsock_virtio_transport "), "{words}");
        assert!(words.ends_with(" extra=1"), "{words}");
        assert_eq!(guest.addresses, [(0, "10.0.0.1/24".into()), (1, "fd00::1/64".into())]);
        assert!(guest.shares_memory());
        assert!(!GuestBuilder::new("b").net(Net::tap("t0")).disk(Disk::file("/f")).shares_memory());
        let words = GuestBuilder::new("b").kernel_cmdline(Accelerator::Tcg);
        assert!(words.ends_with("lab.name=b lab.mods="), "{words}");
    }

    #[test]
    fn what_the_emulator_needs_is_done_only_under_it() {
        let guest = GuestBuilder::new("a").root_ports(1);
        let (tcg, kvm) = (Accelerator::Tcg, Accelerator::Kvm);
        let words =
            ["tsc=reliable", "mitigations=off", "no_timer_check", "cryptomgr.notests", "_stall_"];
        for word in words {
            assert!(guest.kernel_cmdline(tcg).contains(word), "{word}");
            assert!(!guest.kernel_cmdline(kvm).contains(word), "{word}");
        }
        assert!(guest.kernel_cmdline(kvm).ends_with(" lab.name=a lab.mods="));
        assert_eq!(
            (guest.smp(tcg).as_str(), guest.smp(kvm).as_str()),
            ("1,maxcpus=2", "1,maxcpus=1")
        );
    }
}
