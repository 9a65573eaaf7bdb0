"""Images larger than memory: where their pixels come from, where their features go (docs/huge.md).

source.py  formats.py                              what a source is, and which file is read by which
arrays.py  tiff.py  slides.py  scenes.py  zarr_source.py     one file for each kind of source
picture.py  channels.py  resample.py               a source at one resolution, in three channels: what the model sees
where.py                                           which patches are read
sinks.py  place.py                                 what features are written to; where they lie on a slide or on earth
options.py                                         what the commands ask
"""
