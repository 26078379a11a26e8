//! Guests with what members of channels need: root ports to plug memory into while it runs, a
//! second monitor, memory of a power of two.

#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use lab::device::MAX_ROOT_PORTS;
use lab::{Guest, KernelChoice, Lab};
use serde_json::{Value, json};

const BOOT: Duration = Duration::from_secs(180);
const LEN_BYTES: u64 = 256 << 20;
/// Search for the ivshmem device by its PCI number; the memory is its third BAR.
const FIND: &str = "grep -lx 0x1110 /sys/bus/pci/devices/*/device";

/// The second monitor, as the daemon uses it.
struct Monitor(BufReader<UnixStream>);

impl Monitor {
    fn new(socket: &std::path::Path) -> Self {
        let mut monitor = Self(BufReader::new(UnixStream::connect(socket).unwrap()));
        assert!(monitor.line().get("QMP").is_some());
        monitor.run("qmp_capabilities", json!({}));
        monitor
    }

    fn line(&mut self) -> Value {
        let mut line = String::new();
        assert_ne!(self.0.read_line(&mut line).unwrap(), 0, "QEMU ended");
        serde_json::from_str(&line).unwrap()
    }

    #[track_caller]
    fn run(&mut self, command: &str, arguments: Value) {
        let text = json!({"execute": command, "arguments": arguments}).to_string();
        self.0.get_mut().write_all(text.as_bytes()).unwrap();
        let mut answer = self.line();
        while answer.get("event").is_some() {
            answer = self.line();
        }
        assert!(answer.get("return").is_some(), "{command}: {answer}");
    }

    fn wait_event(&mut self, name: &str) {
        while self.line().get("event") != Some(&name.into()) {}
    }
}

fn plug(monitor: &mut Monitor, file: &std::path::Path, port: u8) {
    let (memory, device) = (format!("m{port}"), format!("d{port}"));
    monitor.run(
        "object-add",
        json!({"qom-type": "memory-backend-file", "id": memory, "size": LEN_BYTES,
               "mem-path": file, "share": true, "readonly": true}),
    );
    monitor.run(
        "device_add",
        json!({"driver": "ivshmem-plain", "id": device, "memdev": memory,
               "bus": format!("millrace{port}")}),
    );
}

#[test]
fn memory_is_plugged_in_and_out() {
    let lab = Lab::new().unwrap();
    let file = lab.scratch("peer", LEN_BYTES).unwrap();
    let mut first = std::fs::File::options().write(true).open(&file).unwrap();
    first.write_all(&[0x78, 0x56, 0x34, 0x12]).unwrap();
    for kernel in KernelChoice::CURRENT {
        let socket = lab.path(&format!("monitor-{kernel}"));
        let guest = Guest::builder("a")
            .kernel(kernel)
            .memory_mb(130)
            .memory_power_of_two()
            .root_ports(MAX_ROOT_PORTS)
            .monitor(&socket);
        let [guest] = lab::boot(&lab, [guest], BOOT).unwrap();
        let sizes = guest.qmp("query-memory-size-summary", json!({})).unwrap();
        assert_eq!(sizes["base-memory"], 256 << 20);

        let mut monitor = Monitor::new(&socket);
        for port in [0, 1, 8, MAX_ROOT_PORTS - 1] {
            plug(&mut monitor, &file, port);
            // Its BAR lies above 4 GiB and cannot be written to.
            let script = format!(
                "until found=$({FIND}); do :; done; found=${{found%/device}}
                 until set -- $(sed -n 3p $found/resource) && [ $1 != $2 ]; do :; done
                 echo $(($2 - $1 + 1)) $(($1 >> 32 > 0)); echo 1 > $found/enable
                 devmem $1 32; devmem $1 32 0; devmem $1 32"
            );
            let told = guest.sh(&script).unwrap();
            assert_eq!(told, format!("{LEN_BYTES} 1\n0x12345678\n0x12345678"), "{kernel} {port}");
            monitor.run("device_del", json!({"id": format!("d{port}")}));
            monitor.wait_event("DEVICE_DELETED");
            monitor.run("object-del", json!({"id": format!("m{port}")}));
        }
    }
}
