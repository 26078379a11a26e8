//! A daemon with the module `sql`, a relay, and Debian's MariaDB with its own engine FederatedX, on
//! this machine.

use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lab::{Lab, apt, mariadb};
use modules::engine::{hex, read_wasm};
use relay::link::{Plan, SILENCE};
use relay::serve::{Config, Relay};
use relay::{Address, Listen};

use crate::client::{self, Failed, MySql};
use crate::common::{Daemon, Place};

/// After this a test has failed.
const LIMIT: Duration = Duration::from_secs(120);

/// Path of the module that `make modules` makes.
fn wasm() -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/modules/sql.wasm");
    assert!(path.is_file(), "{} is not there: run `make modules`", path.display());
    path.canonicalize().unwrap()
}

/// The host's side, and the relay that a guest would run.
pub struct World {
    pub place: Place,
    pub daemon: Daemon,
    /// Address of the relay.
    pub address: SocketAddr,
    stop: Option<UnixStream>,
    relay: Option<JoinHandle<()>>,
}

impl World {
    pub fn new() -> Self {
        let (_, hash) = read_wasm("sql", &wasm()).unwrap();
        let place = Place::new(&format!(
            "state_dir='@/state'\n[[module]]\nname='sql'\npath={:?}\nsha256='{}'\ndeadline_ms=2000\n\
             [[vm]]\nname='db'\n[vm.modules]\nuse=['sql']\ndir='@/files'\nsocket='@/run/db.sock'\n",
            wasm(),
            hex(&hash)
        ));
        // What else runs on this machine does not make a statement too long.
        std::fs::create_dir_all(place.path("files/sql")).unwrap();
        std::fs::write(place.path("files/sql/statement-ms"), "1000").unwrap();
        let daemon = place.start();
        let (told, stop) = UnixStream::pair().unwrap();
        let plan = Plan {
            host: Address::Unix(place.socket("db.sock")),
            patience: Duration::from_secs(60),
            first_line: Vec::new(),
            is_greeted: true,
            silence: SILENCE,
        };
        let listen = Listen::Tcp(SocketAddr::from(([127, 0, 0, 1], 0)));
        let module = "sql".to_owned();
        let config = Config { plan, module, listen, mode: 0o600, max_connections: 64 };
        let relay = Relay::new(config).unwrap();
        let address = relay.tcp_address().unwrap();
        let relay = Some(std::thread::spawn(move || relay.run(told).unwrap()));
        Self { place, daemon, address, stop: Some(stop), relay }
    }

    /// A connection to the module; as every program must, it connects again while there is no
    /// process.
    pub fn connect(&self, database: &str) -> MySql {
        let begin = Instant::now();
        loop {
            match MySql::connect(&client::Server::Tcp(self.address), database) {
                Ok(client) => return client,
                Err(Failed::Told(code, text)) => panic!("{code}: {text}"),
                Err(Failed::Lost(_)) => assert!(begin.elapsed() < LIMIT, "{}", self.place.log()),
            }
        }
    }

    /// Bytes that the module has sent to its clients.
    pub fn sent_bytes(&self) -> u64 {
        self.daemon.get("/v1/vms/db/modules")[0]["sent_bytes"].as_u64().unwrap()
    }

    /// The process of modules.
    pub fn process(&self) -> Option<i32> {
        self.daemon.module_processes().first().copied()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(relay) = self.relay.take() {
            let _ = relay.join();
        }
    }
}

/// MariaDB's server, without system tables and without passwords.
pub struct Server {
    child: Child,
    folder: tempfile::TempDir,
}

impl Server {
    pub fn start() -> Self {
        let lab = Lab::new().unwrap();
        let unpacked = |package: &str| apt::unpacked(lab.cache(), package).unwrap();
        let (core, all) = (unpacked("mariadb-server-core"), unpacked("mariadb-server"));
        let libraries = mariadb::LIBRARIES.map(unpacked);
        let folders = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"];
        let libraries = libraries.iter().flat_map(|root| folders.map(|folder| root.join(folder)));
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir(at("data")).unwrap();
        std::fs::create_dir(at("tmp")).unwrap();
        let share = core.join("usr/share/mysql");
        let option = |name: &str, path: PathBuf| format!("--{name}={}", path.display());
        let log = std::fs::File::create(at("log")).unwrap();
        let child = Command::new(core.join("usr/sbin/mariadbd"))
            .args(["--no-defaults", "--user=root", "--skip-networking", "--skip-grant-tables"])
            .args(["--innodb-buffer-pool-size=16M", "--innodb-log-file-size=16M"])
            .args(["--character-set-server=utf8mb4", "--plugin-load-add=ha_federatedx.so"])
            .arg(option("datadir", at("data")))
            .arg(option("tmpdir", at("tmp")))
            .arg(option("socket", at("my.sock")))
            .arg(option("pid-file", at("my.pid")))
            .arg(option("lc-messages-dir", share.clone()))
            .arg(option("character-sets-dir", share.join("charsets")))
            .arg(option("plugin-dir", all.join("usr/lib/mysql/plugin")))
            .env("LD_LIBRARY_PATH", std::env::join_paths(libraries).unwrap())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut server = Self { child, folder };
        server.wait();
        server
    }

    fn wait(&mut self) {
        let begin = Instant::now();
        while MySql::connect(&self.socket(), "").is_err() {
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none() && begin.elapsed() < LIMIT, "{ended:?}: {}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn socket(&self) -> client::Server {
        client::Server::Unix(self.folder.path().join("my.sock"))
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    pub fn connect(&self, database: &str) -> MySql {
        MySql::connect(&self.socket(), database).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
