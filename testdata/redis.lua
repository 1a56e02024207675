-- Runs a script as Redis would, in the Lua that runs this file: what tests the script of buckets under another Lua than that of Redis.
--
-- arg[1]  the script
-- stdin   for each run: the number of keys, that of arguments, then these; each on a line of its own, as its length and, on the
--         next line, its bytes
-- stdout  for each run: the replies of the script, each as such two lines; then the time to live of what it has written, in
--         milliseconds, empty if it has written nothing
--
-- Keys are strings that do not expire, and nobody holds a lock.

local kept, ttl, run = {}, '', assert(loadfile(arg[1]))

local commands = {
  GETRANGE = function(key, from, to) return (kept[key] or ''):sub(from + 1, to + 1) end,
  SET = function(key, value, _, millis)
    kept[key], ttl = value, millis
    return {ok = 'OK'}
  end,
  EXISTS = function() return 0 end,
}

local function call(name, ...) return assert(commands[name], name)(...) end

redis = {call = call, pcall = call}

local function read()
  local length = io.read('n', 'L')
  if not length then return end
  local text = length == 0 and '' or assert(io.read(length))
  io.read(1)
  return text
end

local function list(count)
  local all = {}
  for i = 1, count do all[i] = read() end
  return all
end

for keys in read do
  local arguments = tonumber(read())
  KEYS = list(tonumber(keys))
  ARGV = list(arguments)
  ttl = ''
  local replies = run()
  replies[#replies + 1] = ttl
  for _, reply in ipairs(replies) do io.write(#reply, '\n', reply, '\n') end
  io.flush()
end
