//! Dates of HTTP, in the one form that is still written: `Sun, 06 Nov 1994 08:49:37 GMT`.

use alloc::format;
use alloc::string::String;

const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
const MONTHS: [&str; 12] =
    ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
/// The last second of the year 9999.
const LAST: u64 = 253_402_300_799;

/// Seconds since 1970; none: it is no date of that form, or an earlier one.
pub fn parse(text: &[u8]) -> Option<u64> {
    let text = core::str::from_utf8(text).ok().filter(|t| t.len() == 29 && t.is_ascii())?;
    let number = |from: usize, to: usize| -> Option<u64> {
        let digits = text.get(from..to)?;
        digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok())?
    };
    let month = MONTHS.iter().position(|m| *m == &text[8..11])? as u64 + 1;
    let (day, year) = (number(5, 7)?, number(12, 16)?);
    let (hour, minute, second) = (number(17, 19)?, number(20, 22)?, number(23, 25)?);
    let days = days_of(year, month, day)?;
    // A leap second is the one before it.
    let seconds = days * 86_400 + hour * 3600 + minute * 60 + second.min(59);
    let is_time = hour < 24 && minute < 60 && second <= 60;
    let written =
        if second == 60 { String::from(text).replace(":60 ", ":59 ") } else { text.into() };
    (is_time && format(seconds) == written).then_some(seconds)
}

/// The date of a second since 1970.
pub fn format(seconds: u64) -> String {
    let seconds = seconds.min(LAST);
    let (days, time) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = date_of(days);
    format!(
        "{}, {day:02} {} {year:04} {:02}:{:02}:{:02} GMT",
        DAYS[(days % 7) as usize],
        MONTHS[(month - 1) as usize],
        time / 3600,
        time / 60 % 60,
        time % 60
    )
}

/// Days since 1970 of a date. Years begin in March here, so that leap days are at their ends.
fn days_of(year: u64, month: u64, day: u64) -> Option<u64> {
    let year = if month <= 2 { year.checked_sub(1)? } else { year };
    let (era, of_era) = (year / 400, year % 400);
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day.checked_sub(1)?;
    let days = era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year;
    days.checked_sub(719_468)
}

fn date_of(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let years = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * years + years / 4 - years / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = (month + 2) % 12 + 1;
    (era * 400 + years + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn dates_are_those_of_the_standard() {
        let text = "Sun, 06 Nov 1994 08:49:37 GMT";
        assert_eq!(parse(text.as_bytes()), Some(784_111_777));
        assert_eq!(format(784_111_777), text);
        assert_eq!(format(0), "Thu, 01 Jan 1970 00:00:00 GMT");
        assert_eq!(format(951_782_400), "Tue, 29 Feb 2000 00:00:00 GMT");
        assert_eq!(format(u64::MAX), "Fri, 31 Dec 9999 23:59:59 GMT");
        assert!(parse(b"Sat, 31 Dec 2016 23:59:60 GMT").is_some());
        for wrong in [
            "Sunday, 06-Nov-94 08:49:37 GMT",
            "Mon, 06 Nov 1994 08:49:37 GMT",
            "Sun, 31 Feb 1994 08:49:37 GMT",
            "Sun, 06 Nov 1994 24:49:37 GMT",
            "Sun, 06 Nov 1994 08:49:37 UTC",
            "Sun, 00 Nov 1994 08:49:37 GMT",
            "Sun, 06 Nov 0000 08:49:37 GMT",
            "Sun, 06 nov 1994 08:49:37 GMT",
        ] {
            assert_eq!(parse(wrong.as_bytes()), None, "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn every_date_is_read_as_it_was_written(seconds in 0..=LAST) {
            prop_assert_eq!(parse(format(seconds).as_bytes()), Some(seconds));
        }

        #[test]
        fn any_bytes_do_no_harm(text in "[ -~]{29}") {
            parse(text.as_bytes());
        }
    }
}
