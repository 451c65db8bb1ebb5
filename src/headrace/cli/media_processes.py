"""What the processes of a media node are told of the configuration that their parent found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace.cli.house import App
from headrace.engines.mount_guard import RECORD_FILE

if TYPE_CHECKING:
    from headrace.media.worker.telling import Orders

SECTIONS: Final = ("blobs", "media")


def orders_of(app: App) -> Orders:
    """What every child goes by: each setting of its sections that is not a default, as it was written."""
    from headrace.media.worker.telling import Orders

    settings = {
        key: text
        for key, (text, source) in app.config.written.items()
        if source != "default" and key.partition(".")[0] in SECTIONS
    }
    return Orders(
        settings=settings,
        blobs_url=app.configured_urls().blobs_url,
        store_record=str(app.data_folder / RECORD_FILE),
        data_folder=str(app.data_folder),
        run_folder=str(app.media.folder),
        log_level=app.config.sections["data"].log_level,
    )
