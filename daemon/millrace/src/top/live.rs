//! The live view: one thread takes samples, this one draws and reads keys.

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use anyhow::{Context, bail};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::draw::{Choice, draw};
use super::pages::{Page, Sort};
use super::sample::Sample;
use super::view::View;
use super::{Source, Taken};

/// How long a key, a new sample or a signal may wait: what looks immediate.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Rows of a page up or down.
const PAGE_ROWS: usize = 10;

/// Gives the terminal back however this ends; a panic does so by ratatui's hook.
struct Screen(DefaultTerminal);

impl Drop for Screen {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// Runs until the user or a signal ends it. `first` was taken just now.
pub fn run(source: Source, first: Sample, interval: Duration) -> anyhow::Result<()> {
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        bail!("the live view needs a terminal; --once prints one snapshot without");
    }
    let ended = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&ended)).context("catching signals")?;
    }
    let (send, samples) = mpsc::channel();
    std::thread::Builder::new()
        .name("samples".into())
        .spawn(move || take_samples(&source, interval, &send))
        .context("starting the thread that takes samples")?;
    let mut screen = Screen(ratatui::try_init().context("taking the terminal")?);
    show(&mut screen.0, first, &samples, &ended).context("the terminal")
}

/// Takes samples until the receiver is gone.
fn take_samples(source: &Source, interval: Duration, send: &Sender<Taken>) {
    loop {
        std::thread::sleep(interval);
        if send.send(source.take()).is_err() {
            return;
        }
    }
}

fn show(
    terminal: &mut DefaultTerminal,
    first: Sample,
    samples: &Receiver<Taken>,
    ended: &AtomicBool,
) -> std::io::Result<()> {
    let mut view = View::between(&first, &first);
    let mut last = first;
    let mut choice = Choice::default();
    let mut changed = true;
    while !ended.load(Ordering::Relaxed) {
        for taken in samples.try_iter() {
            changed = true;
            match taken {
                Ok(sample) => {
                    view = View::between(&last, &sample);
                    last = sample;
                    choice.trouble = None;
                }
                // What was seen last stays on the screen; a daemon that restarts comes back.
                Err(e) => choice.trouble = Some(crate::process::describe(&e)),
            }
        }
        if std::mem::take(&mut changed) {
            terminal.draw(|frame| draw(frame, &view, &choice))?;
        }
        if !event::poll(LOOK_EVERY)? {
            continue;
        }
        changed = true;
        // Anything else, such as a new size, only has it drawn again.
        if let Event::Key(key) = event::read()?
            && key.kind != KeyEventKind::Release
            && !choice.press(key, &view)
        {
            return Ok(());
        }
    }
    Ok(())
}

impl Choice {
    /// Handles a key; false: the view ends.
    pub fn press(&mut self, key: KeyEvent, view: &View) -> bool {
        let rows = self.page.table(view, self.sort).rows.len();
        match key.code {
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return false,
            KeyCode::Char('q') | KeyCode::Esc => return false,
            KeyCode::Char('v') => self.turn_to(Page::Vms),
            // The same key again leads back.
            KeyCode::Char('p') if self.page == Page::Ports => self.turn_to(Page::Vms),
            KeyCode::Char('p') => self.turn_to(Page::Ports),
            KeyCode::Char('w') if self.page == Page::Workers => self.turn_to(Page::Vms),
            KeyCode::Char('w') => self.turn_to(Page::Workers),
            KeyCode::Down | KeyCode::Char('j') => self.scroll(rows, |at| at + 1),
            KeyCode::Up | KeyCode::Char('k') => self.scroll(rows, |at| at.saturating_sub(1)),
            KeyCode::PageDown => self.scroll(rows, |at| at + PAGE_ROWS),
            KeyCode::PageUp => self.scroll(rows, |at| at.saturating_sub(PAGE_ROWS)),
            KeyCode::Home => self.skipped = 0,
            KeyCode::Char(letter) => self.sort = sort_of(letter).unwrap_or(self.sort),
            _ => {}
        }
        true
    }

    fn turn_to(&mut self, page: Page) {
        (self.page, self.skipped) = (page, 0);
    }

    fn scroll(&mut self, rows: usize, to: impl Fn(usize) -> usize) {
        self.skipped = to(self.skipped).min(rows.saturating_sub(1));
    }
}

/// The order that a letter stands for.
fn sort_of(letter: char) -> Option<Sort> {
    Some(match letter {
        '0' => Sort::Config,
        'n' => Sort::Name,
        's' => Sort::Share,
        'b' => Sort::Bytes,
        'f' => Sort::Frames,
        'r' => Sort::Requests,
        'c' => Sort::Capped,
        'y' => Sort::Yielded,
        'd' => Sort::Drops,
        'l' => Sort::Latency,
        'm' => Sort::Moves,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::super::view::VmView;
    use super::*;

    fn view(rows: usize) -> View {
        View { vms: vec![VmView::default(); rows], ..View::default() }
    }

    #[test]
    fn keys_turn_pages_sort_and_end() {
        let (mut choice, view) = (Choice::default(), view(3));
        let mut press = |c| {
            let more = choice.press(KeyEvent::from(KeyCode::Char(c)), &view);
            (more, choice.page, choice.sort)
        };
        assert_eq!(press('p'), (true, Page::Ports, Sort::Config));
        assert_eq!(press('l'), (true, Page::Ports, Sort::Latency));
        assert_eq!(press('p'), (true, Page::Vms, Sort::Latency));
        assert_eq!(press('w'), (true, Page::Workers, Sort::Latency));
        assert_eq!(press('v'), (true, Page::Vms, Sort::Latency));
        // `c` alone is no end, and no order.
        assert_eq!(press('x'), (true, Page::Vms, Sort::Latency));
        assert!(!press('q').0);
        assert!(!choice.press(KeyEvent::from(KeyCode::Esc), &view));
        let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert!(!choice.press(interrupt, &view));
    }

    #[test]
    fn scrolling_ends_with_the_rows() {
        let (mut choice, view) = (Choice::default(), view(5));
        let press = |choice: &mut Choice, code| choice.press(KeyEvent::from(code), &view);
        for _ in 0..9 {
            press(&mut choice, KeyCode::Down);
        }
        assert_eq!(choice.skipped, 4);
        press(&mut choice, KeyCode::PageUp);
        assert_eq!(choice.skipped, 0);
        press(&mut choice, KeyCode::PageDown);
        press(&mut choice, KeyCode::Up);
        assert_eq!(choice.skipped, 3);
    }
}
