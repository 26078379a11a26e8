//! Session of a client: its login, its commands, its transaction, and the statement under way.
//!
//! FederatedX connects anew when its connection breaks, and goes on as if it had said SET
//! AUTOCOMMIT=0 there. So a savepoint begins a transaction where there is none, unlike in MySQL,
//! and going back to one where there is none means that the transaction is gone: then nothing is
//! done before the client has rolled back.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use crate::answer::Answer;
use crate::errors::{SqlError, code};
use crate::packet::{self, Login, Writer, command};
use crate::plan::{Plan, plan};
use crate::rewrite::quoted;
use crate::shared::Shared;
use crate::show::{self, About, VERSION};
use crate::statement::{ActiveStatement, Context, Progress};
use crate::transaction::Transaction;

/// Phase of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Phase {
    /// Nothing was sent yet.
    #[default]
    New,
    /// The greeting was sent.
    Greeted,
    /// Commands are taken.
    Ready,
    /// The session is over.
    Over,
}

/// Session of a client.
#[derive(Debug, Default)]
pub struct Session {
    /// Phase that it is in.
    pub phase: Phase,
    id: u32,
    /// Statement under way. Before the transaction in the order of fields: statements go first.
    statement: Option<ActiveStatement>,
    tx: Transaction,
    answer: Answer,
}

impl Session {
    /// Says the greeting.
    pub fn greet(&mut self, shared: &mut Shared, out: &mut Vec<u8>) {
        self.id = shared.next_id;
        shared.next_id = shared.next_id.wrapping_add(1).max(1);
        let mut challenge = [0; 20];
        let _ = shared.disk.call(|host| host.random(&mut challenge));
        // None of it may be zero, which would end it.
        challenge.iter_mut().for_each(|b| *b = b'!' + *b % 90);
        Writer::new(out, 0).greeting(self.id, &challenge, VERSION);
        self.phase = Phase::Greeted;
    }

    /// Refuses a client, and ends the session.
    pub fn refuse(&mut self, error: &SqlError, out: &mut Vec<u8>) {
        self.answer.error(error, out);
        self.phase = Phase::Over;
    }

    /// Takes a packet. Its command is done, or under way from now on.
    pub fn take(&mut self, shared: &mut Shared, number: u8, payload: &[u8], out: &mut Vec<u8>) {
        self.answer.number = number.wrapping_add(1);
        let done = match self.phase {
            Phase::Greeted => self.login(shared, payload),
            Phase::Ready => self.command(shared, payload, out),
            Phase::New | Phase::Over => return,
        };
        match done {
            Ok(true) => self.answer.ok(0, 0, self.tx.status(), out),
            Ok(false) => {}
            Err(error) => self.answer.error(&error, out),
        }
    }

    fn login(&mut self, shared: &mut Shared, payload: &[u8]) -> Result<bool, SqlError> {
        let Some(Login { database, .. }) = packet::login(payload) else {
            self.phase = Phase::Over;
            return Err(SqlError::new(code::HANDSHAKE, "Bad handshake"));
        };
        if let Some(name) = database {
            self.phase = Phase::Over;
            self.tx.choose(shared, &String::from_utf8_lossy(&name))?;
        }
        self.phase = Phase::Ready;
        Ok(true)
    }

    /// True: an OK is the answer.
    fn command(
        &mut self,
        shared: &mut Shared,
        payload: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<bool, SqlError> {
        let (kind, body) = payload.split_first().unwrap_or((&0, &[]));
        match *kind {
            command::QUIT => {
                self.phase = Phase::Over;
                Ok(false)
            }
            command::PING | command::SET_OPTION => Ok(true),
            command::INIT_DB => {
                self.tx.choose(shared, &String::from_utf8_lossy(body))?;
                Ok(true)
            }
            command::QUERY => self.query(shared, body, out),
            command::FIELD_LIST => self.fields(shared, body, out),
            command::RESET => {
                self.tx.roll_back(shared);
                (self.tx.is_manual, self.tx.has_begun, self.tx.doom) = (false, false, None);
                Ok(true)
            }
            command::STATISTICS => {
                let mut writer = Writer::new(out, self.answer.number);
                writer.packet(|p| p.extend_from_slice(VERSION.as_bytes()));
                Ok(false)
            }
            command::PREPARE => Err(SqlError::new(
                code::UNKNOWN_COMMAND,
                "the module sql has no prepared statements of the server: let the client prepare them",
            )),
            other => {
                let text = format!("the module sql does not know command {other}");
                Err(SqlError::new(code::UNKNOWN_COMMAND, text))
            }
        }
    }

    fn query(
        &mut self,
        shared: &mut Shared,
        text: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<bool, SqlError> {
        let plan = plan(text)?;
        self.check_doom(&plan)?;
        match plan {
            Plan::Nothing => Ok(true),
            Plan::Begin => {
                self.tx.commit(shared)?;
                self.tx.has_begun = true;
                Ok(true)
            }
            Plan::Commit => self.tx.commit(shared).map(|()| true),
            Plan::Rollback => {
                self.tx.roll_back(shared);
                Ok(true)
            }
            Plan::Autocommit(on) => {
                self.tx.is_manual = !on;
                if on {
                    self.tx.commit(shared)?;
                }
                Ok(true)
            }
            Plan::RollbackTo(name) if !self.tx.is_explicit() => {
                let text = format!("SAVEPOINT {name} does not exist: its transaction is gone");
                self.tx.doom = Some(SqlError::new(code::DEADLOCK, text.clone()));
                Err(SqlError::new(code::NO_SAVEPOINT, text))
            }
            Plan::Use(name) => self.tx.choose(shared, &name).map(|()| true),
            Plan::CreateDatabase(name, may_exist) => {
                self.tx.commit(shared)?;
                shared.create(&name, may_exist).map(|()| true)
            }
            Plan::DropDatabase(name, may_miss) => {
                self.tx.commit(shared)?;
                if self.tx.database.as_deref() == Some(&name) {
                    self.tx.leave(shared);
                }
                shared.remove(&name, may_miss).map(|()| true)
            }
            Plan::Show(show) => self.show(shared, &show, out),
            plan => {
                self.tx.in_use()?;
                if matches!(plan, Plan::Define(_)) {
                    self.tx.commit(shared)?;
                }
                self.tx.has_begun |= matches!(plan, Plan::Savepoint(_));
                self.statement = Some(ActiveStatement::new(plan, text, shared.disk.now_ms()));
                Ok(false)
            }
        }
    }

    /// Tells the client that its transaction is gone, until it has ended it.
    fn check_doom(&mut self, plan: &Plan) -> Result<(), SqlError> {
        if let Some(doom) = &self.tx.doom {
            let ends =
                matches!(plan, Plan::Rollback | Plan::Commit | Plan::Begin | Plan::Autocommit(_));
            let error = doom.clone();
            if ends {
                (self.tx.doom, self.tx.has_begun) = (None, false);
            }
            if *plan != Plan::Rollback {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Answers SHOW, and what else SQLite does not know itself.
    fn show(
        &mut self,
        shared: &mut Shared,
        show: &show::Show,
        out: &mut Vec<u8>,
    ) -> Result<bool, SqlError> {
        let database = self.tx.database.as_deref();
        let about = About { database, id: self.id, autocommit: !self.tx.is_manual };
        let table = match show::answer(show, &about, &shared.names()?) {
            Some(table) => table,
            None => {
                let db = self.tx.in_use()?;
                db.set_until_ms(shared.disk.now_ms() + shared.statement_ms);
                show::of_tables(show, db).map_err(|failure| shared.error(&failure))?
            }
        };
        self.answer.table(&table, self.tx.status(), out);
        Ok(false)
    }

    /// Answers with a table's columns, by which clients complete names.
    fn fields(
        &mut self,
        shared: &mut Shared,
        body: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<bool, SqlError> {
        let table = packet::until_zero(body).map_or(body, |(table, _)| table);
        let sql = format!("SELECT * FROM {}", quoted(&String::from_utf8_lossy(table)));
        let db = self.tx.in_use()?;
        let statement = db.prepare(&sql).map_err(|failure| shared.error(&failure))?;
        let (columns, _) = crate::rows::columns(&statement, false);
        let status = self.tx.status();
        let mut writer = Writer::new(out, self.answer.number);
        for column in &columns {
            writer.column(column, true);
        }
        writer.end(status);
        Ok(false)
    }

    /// Ends the session of a client that has gone.
    pub fn end(&mut self, shared: &mut Shared) {
        self.statement = None;
        self.tx.leave(shared);
        self.phase = Phase::Over;
    }

    /// Statement under way.
    pub fn statement(&self) -> Option<&ActiveStatement> {
        self.statement.as_ref()
    }

    /// Goes on with the statement under way.
    pub fn go_on(&mut self, shared: &mut Shared, out: &mut Vec<u8>) -> Progress {
        let Some(statement) = self.statement.take() else { return Progress::Done };
        let (tx, answer, next) = (&mut self.tx, &mut self.answer, &mut self.statement);
        statement.go_on(&mut Context { tx, answer, shared, out, next })
    }

    /// Gives up the statement under way, which has waited for too long.
    pub fn give_up(&mut self, shared: &mut Shared, out: &mut Vec<u8>) {
        self.statement = None;
        if !self.tx.is_explicit() {
            self.tx.roll_back(shared);
        }
        let text = "Lock wait timeout exceeded; try restarting transaction";
        self.answer.error(&SqlError::new(code::LOCK_WAIT_TIMEOUT, text), out);
    }
}
