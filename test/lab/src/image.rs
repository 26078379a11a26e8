//! Initramfs images: a recipe, hashed, written once and kept in the cache.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::BufWriter;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

use crate::cpio::Archive;
use crate::process::run;
use crate::{Cache, Kernel, LabError, apt, kmod, program, python};

/// Raise when the image's layout changes, so that cached images are made anew.
const LAYOUT: u32 = 3;

/// Root, and whom a database's service runs as.
const USERS: &str = "root:x:0:0:root:/root:/bin/sh\nmysql:x:101:101::/nonexistent:/bin/false\n";
const GROUPS: &str = "root:x:0:\nmysql:x:101:\n";

/// Modules that every image carries, for every device the lab can attach.
const MODULES: [&str; 5] =
    ["virtio_pci", "virtio_console", "virtio_net", "virtio_blk", "vmw_vsock_virtio_transport"];

/// Modules of the packet filter, which the kernel asks for by itself when a rule needs them.
const FILTER_MODULES: [&str; 13] = [
    "nf_tables",
    "nf_conntrack_netlink",
    "nft_ct",
    "nft_chain_nat",
    "nft_nat",
    "nft_masq",
    "nft_redir",
    "nft_limit",
    "nft_numgen",
    "nft_quota",
    "nft_reject_inet",
    "nft_log",
    "nf_log_syslog",
];
/// Packages of the libraries of `nft`.
const FILTER_LIBRARIES: [&str; 8] = [
    "libnftables1",
    "libnftnl11",
    "libmnl0",
    "libjansson4",
    "libxtables12",
    "libgmp10",
    "libedit2",
    "libbsd0",
];

/// Guest path → host file, for everything but the kernel's modules.
type Content = BTreeMap<String, PathBuf>;

/// A finished image.
#[derive(Clone, Debug)]
pub struct Image {
    path: PathBuf,
    len_bytes: u64,
}

impl Image {
    /// Starts a recipe: busybox, the agent and the virtio modules are always in.
    #[must_use]
    pub fn builder() -> ImageBuilder {
        ImageBuilder::default()
    }

    /// The archive.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Size of the image; a guest needs about twice this much memory besides its own.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }
}

/// A recipe for an initramfs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageBuilder {
    programs: BTreeSet<String>,
    modules: BTreeSet<String>,
    files: BTreeMap<String, PathBuf>,
    packaged: BTreeSet<(String, String)>,
    packaged_folders: BTreeSet<(String, String)>,
    library_packages: BTreeSet<String>,
    guest_pieces: bool,
    kmod: bool,
    python_quic: bool,
    fsx: bool,
}

impl ImageBuilder {
    /// Adds a host program, by name or path, with its libraries, at the same path in the guest and
    /// in `/bin`.
    #[must_use]
    pub fn program(mut self, name: impl Into<String>) -> Self {
        self.programs.insert(name.into());
        self
    }

    /// Adds a kernel module with what it needs; the guest loads it with `modprobe NAME` or when
    /// something asks for it.
    #[must_use]
    pub fn module(mut self, name: impl Into<String>) -> Self {
        self.modules.insert(name.into());
        self
    }

    /// Adds a host file at a path in the guest, with the host file's permissions.
    #[must_use]
    pub fn file(mut self, guest: impl Into<String>, host: impl Into<PathBuf>) -> Self {
        self.files.insert(guest.into(), host.into());
        self
    }

    /// Tools for network tests: iperf3, ethtool and the full `ip`.
    #[must_use]
    pub fn net_tools(self) -> Self {
        self.program("iperf3").program("ethtool").program("ip")
    }

    /// Tools for file system tests: ext4, xfs and btrfs with their checkers.
    #[must_use]
    pub fn disk_tools(self) -> Self {
        let tools = ["mke2fs", "e2fsck", "mkfs.xfs", "xfs_repair", "mkfs.btrfs", "btrfs"];
        tools.into_iter().fold(self, ImageBuilder::program).module("xfs").module("btrfs")
    }

    /// Adds a program of a Debian package that is unpacked and not installed on the host (a server,
    /// for one, would be started), at its own path and in `/bin`, with its libraries. These must be
    /// on the host, or in packages named with [`ImageBuilder::libraries_of`].
    #[must_use]
    pub fn packaged(mut self, package: &str, program: &str) -> Self {
        self.packaged.insert((package.to_owned(), program.to_owned()));
        self
    }

    /// Adds all files below a folder of such a package, at their own places: what an interpreter
    /// reads, for one. Their libraries are not looked for.
    #[must_use]
    pub fn packaged_folder(mut self, package: &str, folder: &str) -> Self {
        self.packaged_folders.insert((package.to_owned(), folder.to_owned()));
        self
    }

    /// Takes libraries of packaged programs from Debian packages that are unpacked as well.
    #[must_use]
    pub fn libraries_of(mut self, packages: &[&str]) -> Self {
        self.library_packages.extend(packages.iter().map(|package| (*package).to_owned()));
        self
    }

    /// Adds Millrace's guest pieces, built from this workspace: the agent, the library, the preload
    /// shim and the test program `mrpipe`.
    #[must_use]
    pub fn guest_pieces(mut self) -> Self {
        self.guest_pieces = true;
        self
    }

    /// Adds Millrace's kernel modules, built from this workspace for the guest's kernel, as
    /// `/kmod/NAME.ko`. `modprobe NAME` loads one with all that it needs; `insmod /kmod/NAME.ko
    /// PARAMETER=VALUE` loads one alone.
    #[must_use]
    pub fn kmod(mut self) -> Self {
        self.kmod = true;
        self
    }

    /// Adds Python with aioquic, and a QUIC client and server: `python3 /lab/quic.py`, see there.
    /// About 60 MiB, so that a guest gets at least 240 MiB of memory.
    #[must_use]
    pub fn python_quic(mut self) -> Self {
        self.python_quic = true;
        self
    }

    /// Adds `fsx`: random operations on files or a disk, each byte read compared with a model; see
    /// `lab/fsx`.
    #[must_use]
    pub fn fsx(mut self) -> Self {
        self.fsx = true;
        self
    }

    /// Adds the packet filter: `nft`, and modules for connection tracking, NAT, limits, random
    /// drops, rejects and logs.
    #[must_use]
    pub fn packet_filter(self) -> Self {
        FILTER_MODULES
            .into_iter()
            .fold(self, ImageBuilder::module)
            .packaged("nftables", "/usr/sbin/nft")
            .libraries_of(&FILTER_LIBRARIES)
    }

    /// Builds the image, or finds it in the cache.
    ///
    /// # Errors
    /// A program, library, module or file is missing; the agent does not compile; the disk is
    /// full.
    pub fn build(&self, cache: &Cache, kernel: &Kernel) -> Result<Image, LabError> {
        let agent = program::agent(cache)?;
        let mut content = self.collect(&agent)?;
        self.add_packaged(&mut content, cache)?;
        self.add_ours(&mut content, cache, kernel)?;
        if self.python_quic {
            let tree = python::quic_tree(cache)?;
            add_folder(&mut content, &tree, &tree)?;
        }
        let name = format!("image-{:032x}.cpio", self.hash(&content, kernel)?);
        let path = cache.get(&name, |part| self.write(part, &content, kernel))?;
        let len_bytes =
            fs::metadata(&path).map_err(LabError::io(format!("stat {}", path.display())))?.len();
        Ok(Image { path, len_bytes })
    }

    /// Adds the files of packages.
    fn add_packaged(&self, content: &mut Content, cache: &Cache) -> Result<(), LabError> {
        let mut folders = Vec::new();
        for package in &self.library_packages {
            let unpacked = apt::unpacked(cache, package)?;
            folders.extend(program::LIBRARY_FOLDERS.map(|folder| unpacked.join(folder)));
        }
        for (package, place) in &self.packaged {
            let program = apt::unpacked(cache, package)?.join(place.trim_start_matches('/'));
            for library in program::libraries_in(&program, &folders)? {
                content.insert(program::place_of(&library, cache.root()), library);
            }
            content.insert(place.clone(), program);
        }
        for (package, folder) in &self.packaged_folders {
            let unpacked = apt::unpacked(cache, package)?;
            add_folder(content, &unpacked, &unpacked.join(folder.trim_start_matches('/')))?;
        }
        Ok(())
    }

    /// Adds the programs that are built from this workspace.
    fn add_ours(
        &self,
        content: &mut Content,
        cache: &Cache,
        kernel: &Kernel,
    ) -> Result<(), LabError> {
        if self.guest_pieces {
            for (place, host) in program::guest_pieces(cache)? {
                // The program needs our library, which ldd does not find here, and no other.
                let library = place.starts_with("/usr/lib/");
                let needs = if library { program::libraries(&host)? } else { BTreeSet::new() };
                for library in needs {
                    content.insert(library.to_string_lossy().into_owned(), library);
                }
                content.insert(place, host);
            }
        }
        if self.fsx {
            content.insert("/bin/fsx".into(), program::fsx(cache)?);
        }
        if self.kmod {
            for module in kmod::modules_in(&kmod::build(cache, kernel, &kmod::sources())?)? {
                let name = module.file_name().unwrap_or_default().to_string_lossy().into_owned();
                content.insert(format!("{}/{name}", kmod::GUEST_FOLDER), module);
            }
        }
        Ok(())
    }

    /// Collects the files that every image has, and programs and files of the host.
    fn collect(&self, agent: &Path) -> Result<Content, LabError> {
        let mut content = Content::new();
        content.insert("/bin/busybox".to_owned(), apt::need("busybox")?);
        content.insert("/lab/agent".to_owned(), agent.to_owned());
        // Debian's busybox shell takes its own applets before the programs of the same name.
        let shell = apt::need("dash")?;
        let programs = self.programs.iter().map(|name| apt::need(name));
        for path in std::iter::once(Ok(shell.clone())).chain(programs) {
            let path = path?;
            for library in program::libraries(&path)? {
                content.insert(library.to_string_lossy().into_owned(), library);
            }
            content.insert(path.to_string_lossy().into_owned(), path);
        }
        content.insert("/bin/sh".to_owned(), shell);
        // mke2fs takes its defaults from here.
        for settings in ["/etc/mke2fs.conf"].map(PathBuf::from) {
            if self.programs.contains("mke2fs") && settings.is_file() {
                content.insert(settings.to_string_lossy().into_owned(), settings);
            }
        }
        content.extend(self.files.clone());
        Ok(content)
    }

    /// Identifies the content without reading it: a changed file has another size or time.
    fn hash(&self, content: &Content, kernel: &Kernel) -> Result<u128, LabError> {
        let mut hash = Xxh3::new();
        let about = (LAYOUT, kernel.package(), kernel.version(), &self.modules, &self.programs);
        hash.update(format!("{about:?}").as_bytes());
        for (guest, host) in content {
            let what = format!("stat {}", host.display());
            let found = fs::metadata(host).map_err(LabError::io(what))?;
            let times = (found.len(), found.mtime(), found.mtime_nsec(), found.mode());
            hash.update(format!("{guest:?} {host:?} {times:?}").as_bytes());
        }
        Ok(hash.digest128())
    }

    fn write(&self, path: &Path, content: &Content, kernel: &Kernel) -> Result<(), LabError> {
        let what = format!("write {}", path.display());
        let file = File::create(path).map_err(LabError::io(&what))?;
        let mut tree = Tree::new(BufWriter::with_capacity(1 << 20, file), what);
        for folder in ["bin", "dev", "etc", "proc", "root", "run", "sbin", "sys", "tmp", "lab"] {
            tree.folder(folder)?;
        }
        tree.put(|out| out.character_device("dev/console", 0o600, 5, 1))?;
        for (guest, host) in content {
            tree.host_file(guest, host)?;
        }
        self.write_links(&mut tree, content)?;
        self.write_modules(&mut tree, content, kernel)?;
        tree.text("etc/passwd", USERS)?;
        tree.text("etc/group", GROUPS)?;
        tree.text("etc/hosts", "127.0.0.1 localhost\n::1 localhost\n")?;
        tree.finish()
    }

    /// `/init`, the agent's names, the programs' names in `/bin`, and busybox for all others.
    fn write_links(&self, tree: &mut Tree, content: &Content) -> Result<(), LabError> {
        for name in ["init", "bin/agent", "sbin/modprobe"] {
            tree.link(name, "/lab/agent")?;
        }
        for guest in content.keys() {
            let name = guest.rsplit('/').next().unwrap_or(guest);
            let packaged = self.packaged.iter().map(|(_, program)| program);
            let from_program =
                self.programs.iter().chain(packaged).any(|program| program.ends_with(name));
            if from_program && !guest.starts_with("/bin/") {
                tree.link(&format!("bin/{name}"), guest)?;
            }
        }
        let applets = run(std::process::Command::new(apt::need("busybox")?).arg("--list"))?;
        for applet in String::from_utf8_lossy(&applets).lines() {
            if applet != "busybox" {
                tree.link(&format!("bin/{applet}"), "/bin/busybox")?;
            }
        }
        Ok(())
    }

    /// The modules and the list from which the agent loads them.
    fn write_modules(
        &self,
        tree: &mut Tree,
        content: &Content,
        kernel: &Kernel,
    ) -> Result<(), LabError> {
        let mut table = kernel.modules()?;
        let mut added = Vec::new();
        for (guest, host) in content.iter().filter(|(guest, _)| guest.ends_with(".ko")) {
            added.push(table.add(guest, &kmod::needs(host)?));
        }
        let folder = kernel.modules_folder();
        let mut list = String::new();
        let mut listed = BTreeSet::new();
        let wanted = MODULES.into_iter().chain(self.modules.iter().map(String::as_str));
        let mut todo: Vec<String> = wanted.map(str::to_owned).chain(added).collect();
        while let Some(name) = todo.pop() {
            let Some(module) = table.resolve(&name)? else { continue };
            if !listed.insert(module.name.clone()) {
                continue;
            }
            let names = [vec![module.name], module.aliases].concat().join(" ");
            let paths: Vec<String> = module.paths.iter().map(|path| place_of(path)).collect();
            list.push_str(&format!("{names} : {}\n", paths.join(" ")));
            for path in module.paths {
                // Ours have been written with everything else.
                if !path.starts_with('/') {
                    tree.host_file(&place_of(&path), &folder.join(&path))?;
                }
                // Dependencies are loadable by their own names as well.
                let file = path.rsplit('/').next().unwrap_or(&path);
                todo.extend(file.split(".ko").next().map(str::to_owned));
            }
        }
        tree.text("lab/modules.list", &list)
    }
}

/// Adds all files below a folder, at their places below some root.
fn add_folder(content: &mut Content, root: &Path, folder: &Path) -> Result<(), LabError> {
    for host in program::files_in(folder)? {
        let place = host.strip_prefix(root).unwrap_or(&host);
        content.insert(format!("/{}", place.to_string_lossy()), host);
    }
    Ok(())
}

/// Path of a kernel module in the guest; only those of the kernel's own folder have relative paths.
fn place_of(module: &str) -> String {
    if module.starts_with('/') { module.to_owned() } else { format!("/lab/modules/{module}") }
}

/// An archive under construction; every path is written once, folders before what is in them.
struct Tree {
    archive: Archive<BufWriter<File>>,
    there: BTreeSet<String>,
    what: String,
}

impl Tree {
    fn new(out: BufWriter<File>, what: String) -> Self {
        Self { archive: Archive::new(out), there: BTreeSet::new(), what }
    }

    fn put(
        &mut self,
        write: impl FnOnce(&mut Archive<BufWriter<File>>) -> std::io::Result<()>,
    ) -> Result<(), LabError> {
        write(&mut self.archive).map_err(LabError::io(&self.what))
    }

    /// True the first time a path is seen; its folders are made first.
    fn first(&mut self, path: &str) -> Result<bool, LabError> {
        if let Some((folder, _)) = path.rsplit_once('/') {
            self.folder(folder)?;
        }
        Ok(self.there.insert(path.to_owned()))
    }

    fn folder(&mut self, path: &str) -> Result<(), LabError> {
        let path = path.trim_start_matches('/');
        if !path.is_empty() && self.first(path)? {
            let permissions = if path == "tmp" { 0o1777 } else { 0o755 };
            self.put(|out| out.directory(path, permissions))?;
        }
        Ok(())
    }

    fn link(&mut self, path: &str, target: &str) -> Result<(), LabError> {
        if self.first(path)? {
            self.put(|out| out.symlink(path, target))?;
        }
        Ok(())
    }

    fn text(&mut self, path: &str, content: &str) -> Result<(), LabError> {
        if self.first(path)? {
            self.put(|out| out.file(path, 0o644, content.as_bytes()))?;
        }
        Ok(())
    }

    fn host_file(&mut self, guest: &str, host: &Path) -> Result<(), LabError> {
        let guest = guest.trim_start_matches('/');
        if !self.first(guest)? {
            return Ok(());
        }
        let what = format!("read {}", host.display());
        let mode = fs::metadata(host).map_err(LabError::io(&what))?.mode() & 0o777;
        let content = fs::read(host).map_err(LabError::io(what))?;
        // A program that cargo has just built may lack the execute bit only by accident.
        let mode = if guest == "lab/agent" { 0o755 } else { mode };
        self.put(|out| out.file(guest, mode, &content))
    }

    fn finish(self) -> Result<(), LabError> {
        self.archive.finish().map_err(LabError::io(self.what)).map(|_| ())
    }
}
