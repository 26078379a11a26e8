//! SQL of a load.
//!
//! A stored procedure inserts the rows. A row is a key that counts and bytes of which the first
//! eight are its own and the others the load's, made from a seed: 1 KiB is 1,024 bytes of `v`.

use super::{Form, Shape, Side};

/// The schema of all tables.
pub const SCHEMA: &str = "bench";
/// Bytes that are each row's own.
const OWN_BYTES: u32 = 8;
/// Bytes of the load's pattern, which repeats.
const PATTERN_BYTES: u32 = 4096;

/// Line that the procedure prints before the load.
pub const BEGIN: &str = "load-begins";
/// Followed by its time.
pub const TOOK: &str = "load-took";
/// Followed by the checksum.
pub const SUM: &str = "load-sum";
/// Seconds between those and the load: so that the host's counters are read when nothing happens.
pub const PAUSE_S: &str = "0.15";

/// Address of the host's store.
pub const HOST: &str = "vsock:2:28019";

/// The name of a store in the guest, and of the folder where its disk is mounted.
pub fn inner(side: Side) -> Option<&'static str> {
    match side {
        Side::Virtio => Some("virtio"),
        Side::Ide => Some("ide"),
        Side::Disk => Some("disk"),
        _ => None,
    }
}

/// Socket on which the store in the guest listens.
pub fn socket(name: &str) -> String {
    format!("/run/millrace/{name}.sock")
}

fn table(side: Side) -> String {
    format!("{SCHEMA}.{}", side.name().replace('-', "_"))
}

fn engine(side: Side) -> &'static str {
    match side {
        Side::Innodb => "InnoDB",
        Side::Aria => "Aria TRANSACTIONAL=1",
        Side::Myisam => "MyISAM",
        _ => "MILLRACE",
    }
}

/// Makes the schema, the pattern's function, and a procedure for each side.
pub fn prepare(sides: &[Side], batch: u32) -> String {
    let mut sql = format!(
        "DROP DATABASE IF EXISTS {SCHEMA}; CREATE DATABASE {SCHEMA};\nDELIMITER //\n\
         CREATE FUNCTION {SCHEMA}.pattern(bytes INT, seed INT) RETURNS LONGBLOB DETERMINISTIC\n\
         BEGIN\n\
         \x20 DECLARE part LONGBLOB DEFAULT '';\n\
         \x20 WHILE LENGTH(part) < {PATTERN_BYTES} DO\n\
         \x20   SET part = CONCAT(part, SHA2(CONCAT(seed, '.', LENGTH(part)), 512));\n\
         \x20 END WHILE;\n\
         \x20 RETURN LEFT(REPEAT(part, CEILING(bytes / {PATTERN_BYTES})), bytes);\n\
         END//\n"
    );
    for side in sides {
        sql.push_str(&procedure(*side, batch));
    }
    sql.push_str("DELIMITER ;\n");
    sql
}

/// The first row is not counted: with it the session connects, and the table is opened.
fn procedure(side: Side, batch: u32) -> String {
    let table = table(side);
    let bytes = |key: &str| {
        format!("CONCAT(LPAD(HEX(CRC32(CONCAT(seed, '.', {key}))), {OWN_BYTES}, '0'), pattern)")
    };
    let row = format!("INSERT INTO {table} VALUES (i, {})", bytes("i"));
    let rows = format!(
        "INSERT INTO {table} SELECT i + seq - 1, {} FROM {SCHEMA}.seq_1_to_{batch}",
        bytes("i + seq - 1")
    );
    format!(
        "CREATE PROCEDURE {table}_insert(IN n INT, IN bytes INT, IN shape INT, IN seed INT)\n\
         BEGIN\n\
         \x20 DECLARE i, j INT DEFAULT 0;\n\
         \x20 DECLARE pattern LONGBLOB DEFAULT {SCHEMA}.pattern(bytes - {OWN_BYTES}, seed);\n\
         \x20 DECLARE began DATETIME(6);\n\
         \x20 {row};\n\
         \x20 SET i = 1;\n\
         \x20 SELECT '{BEGIN}';\n\
         \x20 DO SLEEP({PAUSE_S});\n\
         \x20 SET began = SYSDATE(6);\n\
         \x20 IF shape = {} THEN\n\
         \x20   WHILE i <= n DO\n\
         \x20     {row};\n\
         \x20     SET i = i + 1;\n\
         \x20   END WHILE;\n\
         \x20 ELSEIF shape = {} THEN\n\
         \x20   WHILE i <= n DO\n\
         \x20     {rows};\n\
         \x20     SET i = i + {batch};\n\
         \x20   END WHILE;\n\
         \x20 ELSE\n\
         \x20   WHILE i <= n DO\n\
         \x20     START TRANSACTION;\n\
         \x20     SET j = 0;\n\
         \x20     WHILE j < {batch} DO\n\
         \x20       {row};\n\
         \x20       SET i = i + 1, j = j + 1;\n\
         \x20     END WHILE;\n\
         \x20     COMMIT;\n\
         \x20   END WHILE;\n\
         \x20 END IF;\n\
         \x20 SELECT '{TOOK}', TIMESTAMPDIFF(MICROSECOND, began, SYSDATE(6));\n\
         \x20 DO SLEEP({PAUSE_S});\n\
         END//\n",
        Shape::One as u32,
        Shape::Rows as u32
    )
}

/// The settings of a session that uses a side.
fn session(side: Side, form: Form) -> String {
    let on = |yes| if yes { "ON" } else { "OFF" };
    match side {
        Side::Innodb => {
            let flush = if form.durable { 1 } else { 2 };
            format!("SET GLOBAL innodb_flush_log_at_trx_commit = {flush};\n")
        }
        // Soft: the log is synced behind, once in a while.
        Side::Aria if form.durable => {
            "SET GLOBAL aria_group_commit = 'none', aria_group_commit_interval = 0;\n".into()
        }
        Side::Aria => {
            "SET GLOBAL aria_group_commit = 'soft', aria_group_commit_interval = 1000000;\n".into()
        }
        Side::Myisam => String::new(),
        _ => {
            let address = inner(side).map_or(HOST.into(), |name| format!("unix:{}", socket(name)));
            format!(
                "SET GLOBAL millrace_address = '{address}', millrace_ring = '{}', millrace_pool_size = 0;\n\
                 SET SESSION millrace_durable = {}, millrace_buffer_writes = {};\n",
                if side == Side::ModuleRing { "auto" } else { "off" },
                on(form.durable),
                on(side != Side::Module)
            )
        }
    }
}

/// Makes the table anew.
pub fn empty(side: Side, form: Form) -> String {
    let (settings, table, engine) = (session(side, form), table(side), engine(side));
    format!(
        "{settings}DROP TABLE IF EXISTS {table};\n\
         CREATE TABLE {table} (id INT PRIMARY KEY, v LONGBLOB NOT NULL) ENGINE={engine};\n"
    )
}

/// Inserts rows: whole groups.
pub fn insert(side: Side, form: Form, (rows, bytes, seed): (u32, u32, u32)) -> String {
    let (settings, table, shape) = (session(side, form), table(side), form.shape as u32);
    format!("{settings}CALL {table}_insert({rows}, {bytes}, {shape}, {seed});\n")
}

/// Adds everything up.
pub fn sum(side: Side, form: Form) -> String {
    format!(
        "{}SELECT '{SUM}', COUNT(*), SUM(LENGTH(v)), SUM(CRC32(v)) FROM {};\n",
        session(side, form),
        table(side)
    )
}

/// Text behind a word in the output of a load.
pub fn said<'a>(text: &'a str, word: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(word)?.strip_prefix('\t'))
}

/// Whether a checksum is that of so many rows of so many bytes.
pub fn is_whole(sum: &str, rows: u32, bytes: u32) -> bool {
    let mut fields = sum.split('\t').map(|field| field.parse::<u64>().ok());
    let (first, rest) = (u64::from(bytes - OWN_BYTES) + u64::from(OWN_BYTES), u64::from(rows));
    fields.next().flatten() == Some(rest + 1)
        && fields.next().flatten() == Some(first + rest * u64::from(bytes))
        && fields.next().flatten().is_some_and(|crc| crc > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DURABLE: Form = Form { durable: true, shape: Shape::One };

    #[test]
    fn each_side_has_a_table_and_a_procedure_of_its_own() {
        let sql = prepare(&Side::ALL, 16);
        for side in Side::ALL {
            let name = side.name().replace('-', "_");
            assert!(sql.contains(&format!("PROCEDURE bench.{name}_insert(")), "{sql}");
            assert!(empty(side, DURABLE).contains(&format!("CREATE TABLE bench.{name} (")));
        }
        let call = insert(Side::Ide, DURABLE, (10, 1024, 7));
        assert!(call.ends_with("CALL bench.guest_ide_insert(10, 1024, 0, 7);\n"), "{call}");
        assert!(call.contains("'unix:/run/millrace/ide.sock'"), "{call}");
        let batch = insert(Side::Innodb, Form { shape: Shape::Tx, ..DURABLE }, (16, 1024, 7));
        assert!(batch.contains("at_trx_commit = 1") && batch.contains("1024, 2, 7"), "{batch}");
        assert!(
            sql.contains("FROM bench.seq_1_to_16;") && sql.contains("WHILE j < 16 DO"),
            "{sql}"
        );
    }

    #[test]
    fn only_the_side_without_batching_sends_each_write() {
        for side in Side::ALL.into_iter().filter(|s| s.is_stored()) {
            let off = sum(side, DURABLE).contains("millrace_buffer_writes = OFF");
            assert_eq!(off, side == Side::Module, "{side:?}");
        }
        assert!(
            sum(Side::Module, Form { durable: false, ..DURABLE })
                .contains("millrace_durable = OFF")
        );
        assert!(sum(Side::Module, DURABLE).contains(HOST));
    }

    #[test]
    fn answers_are_found_and_checked() {
        let text = "load-begins\nload-took\t12345\nload-sum\t11\t11264\t99\n";
        assert_eq!(said(text, TOOK), Some("12345"));
        assert_eq!(said(text, "load"), None);
        let sum = said(text, SUM).unwrap();
        assert!(is_whole(sum, 10, 1024) && !is_whole(sum, 11, 1024) && !is_whole(sum, 10, 1025));
        assert!(!is_whole("11\t11264\tNULL", 10, 1024) && !is_whole("", 0, 1024));
    }
}
