//! A server of the session from which guests boot over the network: DHCP and TFTP by dnsmasq, and
//! HTTP, by which kernel and image come in TCP's segments.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::process::{DIE_WITH_PARENT, spawn};
use crate::{GuestBuilder, Lab, LabError, apt};

/// Script that iPXE gets by TFTP.
const SCRIPT: &str = "boot.ipxe";

/// Running servers. Dropping them ends them.
#[derive(Debug)]
pub struct BootServer {
    children: Vec<Child>,
}

impl BootServer {
    /// Serves a guest's kernel, image and command line on an interface of the lab's namespace,
    /// whose network is `10.0.0.0/24` and whose own address there is `10.0.0.254`. DHCP lends an
    /// address from `10.0.0.10` on.
    ///
    /// # Errors
    /// A program or the guest's kernel is missing; the disk is full.
    pub fn start(lab: &Lab, ifname: &str, guest: &GuestBuilder) -> Result<Self, LabError> {
        let folder = lab.path("netboot");
        fs::create_dir_all(&folder)
            .map_err(LabError::io(format!("create {}", folder.display())))?;
        let files = guest.boot_files(lab)?;
        crate::program::copy(&files.compressed_kernel, &folder.join("vmlinuz"))?;
        crate::program::copy(&files.initrd, &folder.join("initrd.img"))?;
        let script = folder.join(SCRIPT);
        fs::write(&script, script_text(&files.append))
            .map_err(LabError::io(format!("write {}", script.display())))?;
        let mut server = Self { children: Vec::new() };
        let folder = folder.to_string_lossy();
        let http = apt::need("busybox")?;
        server.add(lab, &http, &["httpd", "-f", "-p", "10.0.0.254:80", "-h", &folder])?;
        let leases = lab.path("leases");
        let dhcp = [
            "--keep-in-foreground",
            "--conf-file=/dev/null",
            "--port=0",
            "--user=root",
            "--pid-file=",
            "--bind-interfaces",
            &format!("--interface={ifname}"),
            "--dhcp-range=10.0.0.10,10.0.0.20",
            &format!("--dhcp-leasefile={}", leases.display()),
            &format!("--dhcp-boot={SCRIPT}"),
            "--enable-tftp",
            &format!("--tftp-root={folder}"),
        ];
        server.add(lab, &apt::need("dnsmasq")?, &dhcp)?;
        Ok(server)
    }

    fn add(&mut self, lab: &Lab, program: &Path, arguments: &[&str]) -> Result<(), LabError> {
        let mut command = Command::new(DIE_WITH_PARENT[0]);
        command.args(&DIE_WITH_PARENT[1..]).arg("nsenter");
        command.arg(format!("--net={}", lab.net().path().display()));
        command.arg(program).args(arguments).stdin(Stdio::null()).process_group(0);
        self.children.push(spawn(command)?);
        Ok(())
    }
}

impl Drop for BootServer {
    fn drop(&mut self) {
        for child in &mut self.children {
            // Fails only when it has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// UEFI's Linux looks for its initial file system by the name on its command line.
fn script_text(append: &str) -> String {
    let from = "http://10.0.0.254";
    format!(
        "#!ipxe\nkernel {from}/vmlinuz initrd=initrd.img {append}\ninitrd {from}/initrd.img\nboot\n"
    )
}
