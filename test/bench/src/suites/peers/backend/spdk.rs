//! SPDK's target with one vhost-user disk. Debian does not carry it.

use serde_json::json;

use crate::harness::error::BenchError;
use crate::harness::process;
use crate::suites::peers::bed::Bed;
use crate::suites::peers::case::{Case, Medium};
use crate::suites::peers::trial::{Backend, NOT_MINE, Running, Trial};

/// One reactor.
pub struct Spdk;

impl Backend for Spdk {
    fn name(&self) -> &'static str {
        "spdk"
    }

    fn needs(&self) -> &'static str {
        "spdk_tgt"
    }

    fn refuses(&self, case: &Case) -> Option<&'static str> {
        match case.medium() {
            Some(Medium::Null | Medium::Disk) => None,
            // It keeps no page cache, and its memory disk is no file.
            _ => NOT_MINE,
        }
    }

    fn start(&self, trial: &Trial<'_>) -> Result<Running, BenchError> {
        let Trial { bed, case, folder, .. } = *trial;
        let config = folder.join("spdk.json");
        std::fs::write(&config, config_text(bed, case))
            .map_err(|e| BenchError::file("write", &config, e))?;
        let mut command = process::command("spdk_tgt", None);
        command.arg("-m").arg(cpu_mask(bed)).arg("-S").arg(folder);
        command.arg("-r").arg(folder.join("rpc.sock")).arg("--json").arg(&config);
        // Its huge pages need a mounted file system; a disk's data is in the front end's anyway.
        command.args(["--no-huge", "-s", "1024", "--no-pci"]);
        trial.launch_disk(self.name(), &mut command)
    }
}

/// Mask of the reactor's CPU.
fn cpu_mask(bed: &Bed) -> String {
    format!("{:#x}", 1u64 << bed.back_cpu)
}

fn config_text(bed: &Bed, case: &Case) -> String {
    let disk = match case.medium() {
        Some(Medium::Disk) => json!({
            "method": "bdev_uring_create",
            "params": {"name": "d", "filename": bed.disk_file, "block_size": 512}
        }),
        _ => json!({
            "method": "bdev_null_create",
            "params": {"name": "d", "num_blocks": 1u64 << 31, "block_size": 512}
        }),
    };
    let cpus = cpu_mask(bed);
    let port = json!({
        "method": "vhost_create_blk_controller",
        "params": {"ctrlr": "a.sock", "dev_name": "d", "cpumask": cpus}
    });
    json!({"subsystems": [
        {"subsystem": "bdev", "config": [disk]},
        {"subsystem": "vhost_blk", "config": [port]}
    ]})
    .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suites::peers::case;

    #[test]
    fn the_disk_of_the_case_is_behind_the_port() {
        let text = |name: &str| {
            let case = case::ALL.into_iter().find(|c| c.name() == name).unwrap();
            config_text(&Bed::pretend(), &case)
        };
        assert!(text("disk_d32").contains("\"filename\":\"/t/disk.raw\""));
        assert!(text("null_d1").contains("bdev_null_create"));
    }
}
