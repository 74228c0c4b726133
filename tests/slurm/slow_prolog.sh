#!/bin/sh
# A Prolog or TaskProlog that takes long, as some sites' do.
exec sleep 20
