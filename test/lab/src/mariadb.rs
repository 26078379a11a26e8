//! Debian's MariaDB, unmodified, in a guest: an image recipe, its start, and SQL.
//!
//! The server's system tables are made once for each version, on the host, by the server itself
//! (`--bootstrap`) from the SQL files of its package, as `mariadb-install-db` does; a guest unpacks
//! them.
//!
//! With the plugin the server is of the very version for which the plugin was made: no other loads
//! it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::process::run;
use crate::{Cache, DEFAULT_TIMEOUT, Guest, ImageBuilder, LabError, apt, program};

/// Socket of the server in the guest.
pub const SOCKET: &str = "/run/mysqld/mysqld.sock";
/// Log file of the server.
pub const LOG: &str = "/tmp/mariadbd.log";
/// Runs SQL that stands on its standard input, or after `-e`: tabs between columns, no names, each
/// line at once.
pub const CLIENT: &str = "mariadb --no-defaults -S /run/mysqld/mysqld.sock -N -B -n";
/// Time for the server to start: under emulation it initialises for some seconds.
const START: Duration = Duration::from_secs(120);

const SERVER: &str = "mariadb-server-core";
const TABLES: &str = "/lab/mariadb.tgz";
const PLUGIN: &str = "/usr/lib/mysql/plugin/ha_millrace.so";
/// Gives the memory that is shared with the host to the server, if there is some.
const RING_TOOL: &str = "/usr/lib/mysql/millrace-ring";
/// The user of Debian's service.
const USER: &str = "mysql";
/// Packages of the libraries of server and client.
pub const LIBRARIES: [&str; 13] = [
    "libaio1",
    "libnuma1",
    "liburing2",
    "libpcre2-8-0",
    "libssl3",
    "libsystemd0",
    "libcap2",
    "libgcrypt20",
    "libgpg-error0",
    "libedit2",
    "libncurses6",
    "libbsd0",
    "libmd0",
];
/// The package's SQL files that make the system tables, in order; without help texts.
const SQL: [&str; 4] = [
    "mysql_system_tables.sql",
    "mysql_performance_tables.sql",
    "mysql_system_tables_data.sql",
    "maria_add_gis_sp_bootstrap.sql",
];
/// Before them: root comes in by its socket, and nobody else.
const SQL_HEAD: &str = "create database mysql;\nuse mysql;\nset @auth_root_socket='root';\n\
     set @skip_auth_anonymous=1;\nset @current_hostname='localhost';\n";
/// Small, so that the archive is unpacked in no time.
const FIRST_LOG: &str = "--innodb-log-file-size=16M";

/// The server, as it goes into an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MariaDb {
    version: Option<String>,
    plugin: Option<PathBuf>,
    runs_as_root: bool,
}

impl MariaDb {
    /// The newest that the package sources have, without the plugin.
    #[must_use]
    pub fn newest() -> Self {
        Self::default()
    }

    /// With the storage engine MILLRACE, as `scripts/mariadb-plugin` makes it, in the version that
    /// stands in the file `version` beside it.
    ///
    /// # Errors
    /// One of the two is not there.
    pub fn with_plugin(plugin: &Path) -> Result<Self, LabError> {
        let missing = || LabError::Missing {
            what: format!("the plugin {}", plugin.display()),
            remedy: "run scripts/mariadb-plugin".into(),
        };
        let version = fs::read_to_string(plugin.with_file_name("version"));
        let version = version.map_err(|_| missing())?.trim().to_owned();
        if !plugin.is_file() || version.is_empty() {
            return Err(missing());
        }
        Ok(Self { version: Some(version), plugin: Some(plugin.to_owned()), runs_as_root: false })
    }

    /// Runs as root and not as Debian's user for it: reaches sockets that are root's alone.
    #[must_use]
    pub fn as_root(mut self) -> Self {
        self.runs_as_root = true;
        self
    }

    fn package(&self, name: &str) -> String {
        match &self.version {
            Some(version) => format!("{name}={version}"),
            None => name.to_owned(),
        }
    }

    /// Puts server, client, system tables and, if there is one, the plugin into an image: about 45
    /// MiB, so that a guest with it has at least 200 MiB of memory.
    ///
    /// # Errors
    /// A package cannot be had; the system tables cannot be made.
    pub fn add_to(&self, image: ImageBuilder, cache: &Cache) -> Result<ImageBuilder, LabError> {
        let server = self.package(SERVER);
        let image = image
            .packaged(&server, "/usr/sbin/mariadbd")
            .packaged(&self.package("mariadb-client-core"), "/usr/bin/mariadb")
            .packaged_folder(&server, "/usr/share/mysql/charsets")
            .packaged_folder(&server, "/usr/share/mysql/english")
            .libraries_of(&LIBRARIES)
            .file(TABLES, self.system_tables(cache)?);
        Ok(match &self.plugin {
            Some(plugin) => {
                image.file(PLUGIN, plugin).file(RING_TOOL, plugin.with_file_name("millrace-ring"))
            }
            None => image,
        })
    }

    /// The archive of a data folder with nothing but system tables.
    fn system_tables(&self, cache: &Cache) -> Result<PathBuf, LabError> {
        let unpacked = apt::unpacked(cache, &self.package(SERVER))?;
        let mut libraries = Vec::new();
        for package in LIBRARIES {
            let root = apt::unpacked(cache, package)?;
            libraries.extend(program::LIBRARY_FOLDERS.map(|folder| root.join(folder)));
        }
        let version = self.version.as_deref().unwrap_or("newest");
        cache.get(&format!("mariadb-tables-{version}.tgz"), |part| {
            let work = part.with_extension("data");
            crate::cache::remove(&work)?;
            let made = bootstrap(&unpacked, &libraries, &work).and_then(|data| {
                let tar = apt::need("tar")?;
                run(Command::new(tar).arg("-czf").arg(part).arg("-C").arg(data).arg(".")).map(drop)
            });
            crate::cache::remove(&work)?;
            made
        })
    }

    /// Starts the server in a guest and waits until it takes connections. `folder` gets the system
    /// tables if it has none; `options` are more words of its command line. It listens on
    /// [`SOCKET`] alone. An earlier server's log goes: its words would be taken for this one's.
    ///
    /// # Errors
    /// It ends or is silent, with its log in the error.
    pub fn start(&self, guest: &Guest, folder: &str, options: &[&str]) -> Result<(), LabError> {
        guest.run_for(&self.start_script(folder, options), START)?.ok().map(drop)
    }

    fn start_script(&self, folder: &str, options: &[&str]) -> String {
        let user = if self.runs_as_root { "root" } else { USER };
        let (plugin, ring) = match self.plugin {
            // A server of a stable release refuses plugins that call themselves less mature.
            Some(_) => (
                "--plugin-maturity=unknown --plugin-load-add=ha_millrace.so",
                format!("{RING_TOOL} {user} > /dev/null 2>&1 || true; "),
            ),
            None => ("", String::new()),
        };
        format!(
            "set -e; mkdir -p {folder} /run/mysqld; ip link set lo up; \
             [ -d {folder}/mysql ] || tar -xzf {TABLES} -C {folder}; rm -f {SOCKET} {LOG}; {ring}\
             chown -R {user}:{user} {folder} /run/mysqld; \
             mariadbd --no-defaults --user={user} --datadir={folder} --socket={SOCKET} \
             --pid-file=/run/mysqld/mysqld.pid --skip-networking --tmpdir=/tmp {plugin} {} \
             > {LOG} 2>&1 < /dev/null & server=$!; \
             until grep -qs 'ready for connections' {LOG}; do \
             kill -0 $server 2> /dev/null || {{ cat {LOG}; exit 1; }}; sleep 0.1; done",
            options.join(" ")
        )
    }
}

/// Makes a data folder below `work` with an unpacked server.
fn bootstrap(server: &Path, libraries: &[PathBuf], work: &Path) -> Result<PathBuf, LabError> {
    let share = server.join("usr/share/mysql");
    let data = work.join("data");
    fs::create_dir_all(&data).map_err(LabError::io(format!("create {}", data.display())))?;
    let mut sql = SQL_HEAD.to_owned();
    for name in SQL {
        let path = share.join(name);
        let what = format!("read {}", path.display());
        sql.push_str(&fs::read_to_string(path).map_err(LabError::io(what))?);
    }
    let input = work.join("bootstrap.sql");
    let what = format!("write {}", input.display());
    fs::write(&input, sql).map_err(LabError::io(what))?;
    let path = std::env::join_paths(libraries)
        .map_err(|e| LabError::io("find the server's libraries")(std::io::Error::other(e)))?;
    // A shell, since what is run here has no standard input of its own.
    let script = "exec \"$@\" < \"$INPUT\"";
    run(Command::new(apt::need("dash")?)
        .args(["-c", script, "bootstrap"])
        .arg(server.join("usr/sbin/mariadbd"))
        .args(["--no-defaults", "--bootstrap", "--user=root", FIRST_LOG, "--tmpdir=/tmp"])
        .arg(format!("--datadir={}", data.display()))
        .arg(format!("--lc-messages-dir={}", share.display()))
        .arg(format!("--character-sets-dir={}", share.join("charsets").display()))
        .env("INPUT", &input)
        .env("LD_LIBRARY_PATH", path))?;
    Ok(data)
}

/// Runs SQL in a guest's server; rows as lines, columns between tabs.
///
/// # Errors
/// A statement fails, with the server's words; it takes longer than [`DEFAULT_TIMEOUT`].
pub fn sql(guest: &Guest, text: &str) -> Result<String, LabError> {
    guest.run_for(&sql_script(text), DEFAULT_TIMEOUT)?.ok()
}

/// The script with which a guest runs SQL.
#[must_use]
pub fn sql_script(text: &str) -> String {
    format!("{CLIENT} << 'MILLRACE_SQL'\n{text}\nMILLRACE_SQL\n")
}

/// The last lines of the server's log.
///
/// # Errors
/// The guest died.
pub fn log_tail(guest: &Guest, lines: usize) -> Result<String, LabError> {
    guest.sh(&format!("tail -n {lines} {LOG}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plugin_fixes_the_servers_version() {
        let folder = tempfile::tempdir().unwrap();
        let plugin = folder.path().join("ha_millrace.so");
        let error = MariaDb::with_plugin(&plugin).unwrap_err().to_string();
        assert!(error.contains("scripts/mariadb-plugin"), "{error}");
        fs::write(folder.path().join("version"), "1:10.11.1-0+deb12u1\n").unwrap();
        assert!(MariaDb::with_plugin(&plugin).is_err());
        fs::write(&plugin, "").unwrap();
        let server = MariaDb::with_plugin(&plugin).unwrap();
        assert_eq!(
            server.package("mariadb-server-core"),
            "mariadb-server-core=1:10.11.1-0+deb12u1"
        );
        assert!(server.start_script("/d", &[]).contains("--plugin-load-add=ha_millrace.so"));
        assert_eq!(MariaDb::newest().package("x"), "x");
        let script = MariaDb::newest().start_script("/d", &["--innodb-buffer-pool-size=32M"]);
        assert!(script.contains("--innodb-buffer-pool-size=32M") && !script.contains("plugin"));
    }

    #[test]
    fn sql_is_not_for_the_shell() {
        let script = sql_script("SELECT '$HOME', `x`;");
        assert!(
            script.contains("<< 'MILLRACE_SQL'\nSELECT '$HOME', `x`;\nMILLRACE_SQL\n"),
            "{script}"
        );
    }

    #[test]
    fn a_guest_has_a_database() {
        let lab = crate::Lab::new().unwrap();
        let server = MariaDb::newest();
        let image = server.add_to(crate::Image::builder(), lab.cache()).unwrap();
        let guest = Guest::builder("db").memory_mb(512).image(image);
        let [guest] = crate::boot(&lab, [guest], DEFAULT_TIMEOUT).unwrap();
        server.start(&guest, "/data", &["--innodb-buffer-pool-size=16M"]).unwrap();
        assert!(sql(&guest, "SELECT VERSION()").unwrap().starts_with("10.11."));
        for engine in ["InnoDB", "Aria", "MyISAM"] {
            let text = format!(
                "CREATE DATABASE IF NOT EXISTS d; CREATE TABLE d.{engine} (a INT PRIMARY KEY) \
                 ENGINE={engine}; INSERT INTO d.{engine} VALUES (1),(2); SELECT SUM(a) FROM d.{engine}"
            );
            assert_eq!(sql(&guest, &text).unwrap(), "3", "{engine}");
        }
        assert!(sql(&guest, "SELEC 1").unwrap_err().to_string().contains("syntax"));
    }
}
