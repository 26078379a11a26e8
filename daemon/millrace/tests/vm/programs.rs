//! Unmodified programs with the preload shim: what they copy and send goes by pipes, and is right.

use lab::ImageBuilder;
use lab_agent::stream::Stream;

use crate::common::{MIB, beside_others};
use crate::pipe_world::{READY, World, listening, recipe, sh, world_with};

const PYTHON: &str = "/usr/bin/python3.11";
const LEN_BYTES: u64 = 16 * MIB + 4321;

/// Program of the guest: runs one of its functions, with arguments.
const SCRIPT: &str = "
import shutil, socket, sys

def copy(source, target):
    shutil.copyfile(source, target)

def serve(port, path):
    listener = socket.create_server(('', int(port)))
    print('listening', flush=True)
    client, _ = listener.accept()
    with client, open(path, 'rb') as file:
        print(client.sendfile(file), flush=True)

globals()[sys.argv[1]](*sys.argv[2:])
";

fn python() -> ImageBuilder {
    recipe()
        .packaged("python3.11-minimal", PYTHON)
        .packaged_folder("libpython3.11-minimal", "/usr/lib/python3.11")
        .packaged_folder("libpython3.11-stdlib", "/usr/lib/python3.11")
}

/// A VM with a file `f` that programs are to move.
fn world_of(recipe: ImageBuilder) -> World {
    let world = world_with(128, "ext4", recipe);
    world.guest.put_bytes("/tmp/script", 0o644, SCRIPT.as_bytes()).unwrap();
    world.file("f", LEN_BYTES);
    world
}

/// With the shim, and a threshold that all files here are above: what the agent measures under
/// emulation may be far above.
fn shimmed(program: &str) -> String {
    format!("MILLRACE_MIN_BYTES=65536 LD_PRELOAD=/usr/lib/libmillrace-preload.so {program}")
}

/// The file moved by pipes and not otherwise, but for what may be left at its end.
fn assert_piped(world: &World, before: f64) {
    let moved = world.count("srv", "moved_bytes") - before;
    println!("{moved} of {LEN_BYTES} bytes by pipes");
    assert!(moved <= LEN_BYTES as f64 && moved > (LEN_BYTES - 65536) as f64, "{moved}");
}

/// Runs a program that copies `f` to `g`.
fn assert_copies(world: &World, program: &str) {
    let before = world.count("srv", "moved_bytes");
    sh(&world.guest, &shimmed(program));
    assert_piped(world, before);
    // As the disk has it, not the guest's memory.
    let hashes = "echo 3 > /proc/sys/vm/drop_caches; sha256sum /mnt/f /mnt/g | cut -d ' ' -f 1";
    let hashes = sh(&world.guest, &format!("sync; {hashes}"));
    let (source, target) = hashes.trim().split_once('\n').unwrap();
    assert_eq!(source, target, "{program}");
    sh(&world.guest, "rm /mnt/g");
}

#[test]
fn cp_copies_by_a_pipe() {
    let _beside = beside_others();
    let world = world_of(recipe().packaged("coreutils", "/bin/cp"));
    let _agent = world.agent();
    // Busybox has one too, which reads and writes.
    let version = sh(&world.guest, "/bin/cp --version");
    assert!(version.contains("GNU coreutils"), "{version}");
    assert_copies(&world, "/bin/cp /mnt/f /mnt/g");
    sh(&world.guest, "umount /mnt && e2fsck -fn /dev/vda");
}

#[test]
fn python_copies_and_sends_by_pipes() {
    let _beside = beside_others();
    let world = world_of(python());
    let _agent = world.agent();
    assert_copies(&world, &format!("{PYTHON} /tmp/script copy /mnt/f /mnt/g"));

    let before = world.count("srv", "moved_bytes");
    let server = shimmed(&format!("{PYTHON} /tmp/script serve 7000 /mnt/f"));
    let server = listening(&world.guest, &server);
    let mut client = world.connect("10.0.0.1:7000");
    client.read_bytes(&mut Stream::new(1), LEN_BYTES);
    assert!(client.has_ended());
    let told = server.wait(READY).unwrap().ok().unwrap();
    // What it tells of all its output.
    assert!(told.trim().ends_with(&LEN_BYTES.to_string()), "{told:?}");
    assert_piped(&world, before);
    sh(&world.guest, "umount /mnt && e2fsck -fn /dev/vda");
}
