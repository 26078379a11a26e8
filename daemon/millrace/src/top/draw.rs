//! The screen: made of a view and of what the user chose, and of nothing else.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Paragraph, Row, Table as TableWidget};

use super::pages::{Page, Sort, Table, bytes, count, percent, uptime};
use super::view::{SidecoreView, View};

/// State of the screen: the user's choices, and the last failure.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Choice {
    /// Table that is shown.
    pub page: Page,
    /// Order of the table.
    pub sort: Sort,
    /// Rows scrolled away.
    pub skipped: usize,
    /// Why the last sample could not be taken.
    pub trouble: Option<String>,
}

/// Width of a sidecore's bar, in cells.
const BAR_WIDTH: usize = 10;

/// Width of a sidecore's entry: `12 [          ] 100%  `.
const CORE_WIDTH: usize = BAR_WIDTH + 14;

/// Columns between those of the table.
const GAP: u16 = 2;

const DIM: Style = Style::new().fg(Color::DarkGray);
const HEAD: Style = Style::new().add_modifier(Modifier::REVERSED);

/// Draws all of it; nothing of it is larger than the frame.
pub fn draw(frame: &mut Frame<'_>, view: &View, choice: &Choice) {
    let area = frame.area();
    // The table is what people came for: sidecores get a third of the screen.
    let cores = core_lines(view, area.width.into(), usize::from(area.height / 3).max(1));
    let [top, bars, table, foot] = Layout::vertical([
        Constraint::Length(2),
        Constraint::Length(cores.len() as u16),
        Constraint::Min(0),
        Constraint::Length(1),
    ])
    .areas(area);
    frame.render_widget(Paragraph::new(header(view)), top);
    frame.render_widget(Paragraph::new(cores), bars);
    draw_table(frame, table, &choice.page.table(view, choice.sort), choice.skipped);
    frame.render_widget(Paragraph::new(footer(choice)), foot);
}

/// The lines above everything else, for plain text too.
pub fn header_text(view: &View) -> [String; 2] {
    let bytes_per_s: f64 = view.vms.iter().map(|vm| vm.bytes_per_s).sum();
    let first = format!(
        "millrace {}  up {}  sidecores {}/{} active  {} VMs  {} ports",
        view.version,
        uptime(view.uptime_s),
        view.active(),
        view.sidecores.len(),
        view.vms.len(),
        view.ports.len(),
    );
    let second = format!(
        "{} B/s  {} rounds/s  {} wake-ups/s  moves {} (+{})  receivers full {}/s, {} of the time",
        bytes(bytes_per_s),
        count(view.rounds_per_s),
        count(view.wakeups_per_s),
        view.moves,
        view.new_moves,
        count(view.holds_per_s),
        percent(view.held_share),
    );
    [first, second]
}

fn header(view: &View) -> Vec<Line<'static>> {
    header_text(view).map(Line::from).into()
}

/// Sidecores side by side, in at most `most` lines.
fn core_lines(view: &View, width: usize, most: usize) -> Vec<Line<'static>> {
    let per_line = (width / CORE_WIDTH).max(1);
    let lines = view.sidecores.chunks(per_line);
    let hidden = lines.len().saturating_sub(most);
    // The last line says how many are missing.
    let shown = if hidden > 0 { most - 1 } else { most };
    let mut out: Vec<Line<'static>> = lines
        .take(shown)
        .map(|line| Line::from(line.iter().flat_map(core_spans).collect::<Vec<_>>()))
        .collect();
    if hidden > 0 {
        let missing = view.sidecores.len() - (shown * per_line).min(view.sidecores.len());
        out.push(Line::styled(format!("... and {missing} more sidecores"), DIM));
    }
    out
}

/// Number, bar, busy share; a parked one is grey.
fn core_spans(core: &SidecoreView) -> [Span<'static>; 4] {
    let filled = (core.busy_share * BAR_WIDTH as f64).round().clamp(0.0, BAR_WIDTH as f64) as usize;
    let color = match core.busy_share {
        _ if !core.active => Color::DarkGray,
        busy if busy >= 0.9 => Color::Red,
        busy if busy >= 0.6 => Color::Yellow,
        _ => Color::Green,
    };
    let style = Style::new().fg(color);
    let state =
        if core.active { format!("{:3.0}%", core.busy_share * 100.0) } else { "park".into() };
    [
        Span::raw(format!("{:>3} [", core.index)),
        Span::styled("|".repeat(filled), style),
        Span::raw(format!("{}] ", " ".repeat(BAR_WIDTH - filled))),
        Span::styled(format!("{state:<6}  "), if core.active { Style::new() } else { style }),
    ]
}

fn draw_table(frame: &mut Frame<'_>, area: Rect, table: &Table, skipped: usize) {
    let widths = widths(table);
    let line = |cells: &[String]| {
        let cells = cells.iter().zip(&widths).enumerate();
        Row::new(cells.map(|(i, (text, &width))| Cell::from(aligned(text, width, i < table.texts))))
    };
    let head: Vec<String> = table.head.iter().map(|h| (*h).to_owned()).collect();
    // One line is the head; the last rows never scroll away.
    let room = usize::from(area.height.saturating_sub(1)).max(1);
    let skipped = skipped.min(table.rows.len().saturating_sub(room));
    let rows = table.rows.iter().skip(skipped).take(room).map(|row| line(row));
    let lengths = widths.iter().map(|w| Constraint::Length(*w as u16));
    let widget =
        TableWidget::new(rows, lengths).header(line(&head).style(HEAD)).column_spacing(GAP);
    frame.render_widget(widget, area);
}

/// Width of each column: that of its widest cell.
pub fn widths(table: &Table) -> Vec<usize> {
    let mut widths: Vec<usize> = table.head.iter().map(|h| h.len()).collect();
    for row in &table.rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    widths
}

/// Texts to the left, numbers to the right.
pub fn aligned(text: &str, width: usize, is_text: bool) -> String {
    if is_text { format!("{text:<width$}") } else { format!("{text:>width$}") }
}

fn footer(choice: &Choice) -> Line<'static> {
    if let Some(trouble) = &choice.trouble {
        return Line::styled(trouble.clone(), Style::new().fg(Color::Red));
    }
    let sorts = match choice.page {
        Page::Vms => "Share Bytes Frames Requests Capped Yielded Drops Latency",
        Page::Ports => "Bytes Requests Drops Latency",
        Page::Workers => "Share Moves",
    };
    let sort = format!("{:?}", choice.sort).to_lowercase();
    Line::styled(format!("q quit  v VMs  p ports  w workers  sort: {sort} ({sorts} Name 0)"), DIM)
}

/// A snapshot in plain text: header, sidecores, VMs, ports, workers.
pub fn plain(view: &View) -> String {
    let mut out = header_text(view).join("\n");
    out.push('\n');
    for s in &view.sidecores {
        let state = if s.active { "active" } else { "parked" };
        let cpu = match (s.cpu, s.node) {
            (Some(cpu), Some(node)) => format!(" (CPU {cpu}, node {node})"),
            (Some(cpu), None) => format!(" (CPU {cpu})"),
            (None, Some(node)) => format!(" (node {node})"),
            (None, None) => String::new(),
        };
        out.push_str(&format!(
            "sidecore {}{cpu} {state}: busy {} polling {} asleep {}, {} rounds/s, {} wake-ups/s, {} workers\n",
            s.index,
            percent(s.busy_share),
            percent(s.spin_share),
            percent(s.asleep_share),
            count(s.rounds_per_s),
            count(s.wakeups_per_s),
            s.workers,
        ));
    }
    for page in [Page::Vms, Page::Ports, Page::Workers] {
        let table = page.table(view, Sort::Config);
        if !table.rows.is_empty() {
            out.push('\n');
            out.push_str(&plain_table(&table));
        }
    }
    out
}

fn plain_table(table: &Table) -> String {
    let widths = widths(table);
    let line = |cells: Vec<&str>| {
        let cells = cells.into_iter().zip(&widths).enumerate();
        let cells: Vec<String> =
            cells.map(|(i, (text, &width))| aligned(text, width, i < table.texts)).collect();
        format!("{}\n", cells.join("  ").trim_end())
    };
    let rows = table.rows.iter().map(|row| line(row.iter().map(String::as_str).collect()));
    std::iter::once(line(table.head.to_vec())).chain(rows).collect()
}

#[cfg(test)]
mod tests;
